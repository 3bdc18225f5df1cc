"""How torch tells what it uses: hooks of modules and of autograd, modes, compiled code."""
