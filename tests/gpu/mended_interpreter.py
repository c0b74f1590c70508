"""Triton's interpreter, made to work with numpy 2.4, and to round to fp8 as a GPU does."""


def mend_interpreter():
    """numpy 2.4 makes no number of an array of one any more; Triton 3.6 wants that of loop bounds. In fp8 it loses
    what is carried into the exponent (0.499 becomes 0.25), and makes 384 of what is no number."""
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    patch, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def patch_and_mend(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    def convert_exactly(numbers, given, wanted, rounding_mode):
        if (given, wanted) == (tl.float32, tl.float8e4nv):
            return torch.from_numpy(numbers.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(numbers, given, wanted, rounding_mode)

    if patch.__name__ != "patch_and_mend":
        interpreter._patch_lang_tensor, interpreter._convert_float = patch_and_mend, convert_exactly
