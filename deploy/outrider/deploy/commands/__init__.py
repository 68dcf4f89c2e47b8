"""Options of each command: its own settings, and the fields of shared settings that it takes.

edge_options      chat, edge, doctor
decode_options    run, demo
serving_options   up, coordinator, verifier
training_options  train, export
operating         status, drain, scale, certs, key, link, submit

To add an option, add a field to the settings that it sets. These modules load neither numpy nor torch, ray or
onnxruntime, since help and completion read them; the module that runs a command is named, and loaded when it runs.
"""
