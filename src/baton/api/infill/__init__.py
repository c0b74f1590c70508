"""llama.cpp's /infill: code between what is before and after a gap, for editors (llama.vim, llama.vscode)."""
