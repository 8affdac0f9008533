"""KV between any two GPUs: a two-rank NCCL communicator per peer, under the stream protocol."""
