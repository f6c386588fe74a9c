"""Facts of a model: config, families, tensors of all formats, tokenizer, chat template, and the store on disk."""
