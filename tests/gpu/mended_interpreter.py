"""Triton's interpreter, made to work with numpy 2.4."""


def mend_interpreter():
    """numpy 2.4 makes no number of an array of one any more; Triton 3.6's interpreter wants that of loop bounds."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    if patch.__name__ != "patch_and_mend":
        interpreter._patch_lang_tensor = patch_and_mend
