"""The sources' equations as slow, literal code: loops over plain tensors, nothing from the library."""
