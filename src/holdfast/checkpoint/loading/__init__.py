"""From files to tensors: matching, reading, other world sizes."""
