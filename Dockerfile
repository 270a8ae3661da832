# vLLM with slimkv, serving one model:
#   docker build -t slimkv .
#   docker run --gpus all --ipc host -p 8000:8000 -v slimkv:/root/.cache slimkv Qwen/Qwen3-0.6B
# The volume keeps the model's files, its calibration and compiled kernels between runs.
FROM vllm/vllm-openai:v0.32.0

COPY . /opt/slimkv
RUN uv pip install --system --no-cache "/opt/slimkv[cli]"

EXPOSE 8000
ENTRYPOINT ["slimkv", "serve", "--engine", "vllm"]
