"""What `holdfast checkpoint` prints, pins and deletes."""
