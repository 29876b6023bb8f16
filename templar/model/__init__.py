"""The language model, its tokenizer and the two training recipes."""
