"""What Holdfast does inside a model's layers: attention over packs, rotary angles, routers, noise on embeddings."""
