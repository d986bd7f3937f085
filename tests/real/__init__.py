"""What a pretrained model shows that no random one does; `make test-real` fetches one and runs these."""
