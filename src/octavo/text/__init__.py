"""Text: from token ids to what a caller sees, incrementally. Knows tokenizers, not models or memory."""
