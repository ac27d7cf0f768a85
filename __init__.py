"""offbook: a text-completions server written as a small company of Trio actors.

The root holds no code on purpose: pytest and pip both see this folder as the package, and an import here would
load every module twice. Start at ``actors/engine.py`` (the embedded API) or ``server/app.py`` (the HTTP door).
"""
