"""Triton adapter of a worker instance; `encoder`, `prefill` and `decode` share this file and differ in parameters."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: spinning threads of idle instances cost cores

import numpy as np
import triton_python_backend_utils as pb_utils
from epd_backend.instance import open_worker

_NO_MEDIA = memoryview(b"")


class TritonPythonModel:
    def initialize(self, args):
        self.worker = open_worker(args)

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def finalize(self):
        self.worker.close()

    def _answer(self, request):
        try:
            plans = pb_utils.get_input_tensor_by_name(request, "PLANS").as_numpy()
            media = pb_utils.get_input_tensor_by_name(request, "MEDIA")
            media = _NO_MEDIA if media is None else memoryview(media.as_numpy())
            reply = self.worker.exchange(memoryview(plans), media)
        except Exception as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{type(error).__name__}: {error}"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTCOMES", np.frombuffer(reply, np.uint8))])
