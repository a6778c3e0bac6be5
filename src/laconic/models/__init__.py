"""The model of a job: built, with its adapters and its tokenizer, and exported as others read it."""
