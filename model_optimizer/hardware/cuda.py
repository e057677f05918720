"""NVIDIA GPUs: what the driver says (NVML) and what torch.cuda measures. Absent hardware is an answer, not an error."""


def nvml_names() -> tuple[str, ...]:
    """Return `name, driver version` per GPU; empty without a driver. Loads no framework."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(f"{pynvml.nvmlDeviceGetName(handle)}, driver {driver}" for handle in handles)
    finally:
        pynvml.nvmlShutdown()
