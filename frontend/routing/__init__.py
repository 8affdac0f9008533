"""Which decode worker gets a request: balancer, the pure choice, and who holds which blocks."""
