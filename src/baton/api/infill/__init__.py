"""llama.cpp's /infill: code for the gap between two texts, for editors (llama.vim, llama.vscode)."""
