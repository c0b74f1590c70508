"""The parts a decoder is made of: plain classes that hold tensors. No autograd, no modules, no state between calls."""
