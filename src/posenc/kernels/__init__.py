"""Fast kernels: tensors in, tensors out; they know no encoding."""
