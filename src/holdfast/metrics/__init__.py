"""What a run says about itself: numbers to files and screens."""
