"""Export model directories in the format of Hugging Face, and adapters in that of peft."""
