"""Changes inside a model's layers: attention over packed rows, rotary angles, routers, and facts of architectures."""
