"""One layer's attention: who sees whom (pattern), how strongly (rule), through which heads, and the waist, `attend`."""
