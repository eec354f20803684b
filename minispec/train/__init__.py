"""Train a draft head for a model, on text that the model writes itself."""
