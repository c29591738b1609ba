"""The fused steps of a decoder block; the readable block in hasten.model.transformer is their reference."""
