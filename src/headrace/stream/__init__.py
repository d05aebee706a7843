import os

# gRPC tells of every connection that ends; errors reach the caller anyway. Read when its core is first used.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
