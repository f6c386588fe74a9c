"""What a model is: its layers, family, config, tensors' names and stored forms, and the memory that they take."""
