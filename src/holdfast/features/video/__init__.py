"""Films: files of videos, decoded into frames."""
