"""The engine's step: what it computes as tensors of fixed addresses (`batch`), and what runs it (`runner`)."""
