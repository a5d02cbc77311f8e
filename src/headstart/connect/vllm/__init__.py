"""headstart under vLLM, through `--kv-transfer-config`: see docs/vllm.md. Importing it imports vLLM."""

from headstart.connect.vllm.connector import HeadstartConnector

__all__ = ["HeadstartConnector"]
