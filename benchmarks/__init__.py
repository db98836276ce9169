"""Speed, memory and accuracy of training and sampling beside TRL and transformers: `python -m benchmarks`."""
