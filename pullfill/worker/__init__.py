"""What decode and prefill workers share: the process, the KV memory, the connector in vLLM."""
