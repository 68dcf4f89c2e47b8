"""What each command takes: its own settings, and which fields of the settings it shares with others.

edge       generate, edge, doctor
decoding   run, demo
serving    up, coordinator, verifier
training   train, export, models
operating  status, drain, scale, certs, key, link, submit, completion

To add an option, add a field to the settings that it sets. These modules load neither numpy nor torch, ray or
onnxruntime, since help and completion read them; what runs a command is named by its module, and loaded when it runs.
"""
