"""LoRA adapters: add them to a model (`lora.py`), find and merge them (`live.py`), peft's files (`files.py`)."""
