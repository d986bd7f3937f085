"""Programs of agents in sandboxes: bubblewrap, podman and docker, whose only way out is the endpoint."""
