"""The parts of a decoder: plain classes that hold tensors. No autograd, no modules, no state between calls."""
