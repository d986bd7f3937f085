"""What the columns of a row mean: messages, pairs, images, videos."""
