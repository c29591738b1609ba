"""The engine: requests in, one step of the model for all of them together, tokens and text out."""
