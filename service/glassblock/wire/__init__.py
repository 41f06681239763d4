"""The wire: messages, endpoints, problem documents and framing, shared by service and client.

Torch-free and FastAPI-free. One module per subject; `endpoints.ENDPOINTS` ties them to paths.
"""
