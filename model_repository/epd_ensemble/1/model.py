"""Triton adapter of the orchestrator: tensors to queries, updates to responses, exchanges to BLS calls."""

import json
import logging

import numpy as np
import triton_python_backend_utils as pb_utils
from epd_orchestrator import process
from epd_orchestrator.checkpoint import Checkpoint
from epd_orchestrator.engine import Engine
from epd_orchestrator.intake import Intake, Query
from epd_orchestrator.metrics import FAMILIES
from epd_orchestrator.responses import Options, ResponseBuilder
from epd_orchestrator.runner import ServerStoppingError
from epd_scheduler import config
from epd_scheduler.request import RefusedError

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
CODES = {  # attributes of pb_utils.TritonError, which does not exist yet while this module is imported
    "invalid_argument": "INVALID_ARG",
    "unavailable": "UNAVAILABLE",
    "cancelled": "CANCELLED",
    "internal": "INTERNAL",
}
FLAGS = [name for name in Options.__struct_fields__ if name != "exclude_input_in_output"]
STOPPING = "Server not ready"  # how each call between models ends from SIGTERM on
NO_MEDIA = b"\0"  # Triton has no empty tensors that a BLS call takes
RESERVED = ("triton_", "binary_data_output")  # request parameters of the protocol, not of sampling


class TritonPythonModel:
    def initialize(self, args):
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        process.require_alone(args["model_name"])
        settings = config.load(config.config_path(args["model_repository"]))
        workers = json.loads(args["model_config"])["parameters"]["workers"]["string_value"].split(",")
        intake = Intake(Checkpoint.load(settings.model), settings.limits)
        self.tokenizer = intake.checkpoint.tokenizer
        self.gauges = Gauges()
        self.engine = Engine(settings, intake, exchange, [name.strip() for name in workers], self.gauges.push)

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                options, query = read_request(request)
                self.engine.submit(query, Client(sender, ResponseBuilder(options, self.tokenizer)))
            except RefusedError as error:
                sender.send(error_response(error.reason, str(error)), flags=FINAL)
            except Exception as error:
                logging.exception("a request could not be taken in")
                sender.send(error_response("internal", f"{type(error).__name__}: {error}"), flags=FINAL)

    def finalize(self):
        self.engine.close()
        self.gauges.close()


class Client:
    """One response sender."""

    def __init__(self, sender, builder):
        self.sender = sender
        self.builder = builder

    def send(self, update):
        if outputs := self.builder.add(update):
            self.sender.send(response(outputs))

    def finish(self, update):
        try:
            if update.end.reason in CODES:
                last = error_response(update.end.reason, update.end.message)
            else:
                last = response(self.builder.add(update))
        except Exception as error:
            logging.exception("the last response could not be built")
            last = error_response("internal", f"{type(error).__name__}: {error}")
        self.sender.send(last, flags=FINAL)

    def cancelled(self):
        return self.sender.is_cancelled()


class Gauges:
    """Triton's metric families. References must be kept, or the metrics are gone."""

    def __init__(self):
        kinds = {
            "counter": pb_utils.MetricFamily.COUNTER,
            "gauge": pb_utils.MetricFamily.GAUGE,
            "histogram": pb_utils.MetricFamily.HISTOGRAM,
        }
        self.kinds = {family.name: family for family in FAMILIES}
        self.families = {
            family.name: pb_utils.MetricFamily(
                name=family.name, description=family.description, kind=kinds[family.kind]
            )
            for family in FAMILIES
        }
        self.metrics = {}

    def close(self):
        """Metrics that live until the process ends crash it then."""
        self.metrics.clear()
        self.families.clear()

    def push(self, values):
        for value in values:
            metric, kind = self.metric(value), self.kinds[value.family].kind
            change = {"counter": metric.increment, "gauge": metric.set, "histogram": metric.observe}[kind]
            change(value.value)

    def metric(self, value):
        key = (value.family, *sorted(value.labels.items()))
        if key not in self.metrics:
            buckets = self.kinds[value.family].buckets
            options = {"buckets": list(buckets)} if buckets else {}
            self.metrics[key] = self.families[value.family].Metric(labels=value.labels, **options)
        return self.metrics[key]


def exchange(name, data, media):
    """A plain blocking call of a worker model. Raises ConnectionError, ServerStoppingError."""
    reply = pb_utils.InferenceRequest(
        model_name=name,
        requested_output_names=["OUTCOMES"],
        inputs=[
            pb_utils.Tensor("PLANS", np.frombuffer(data, np.uint8)),
            pb_utils.Tensor("MEDIA", np.frombuffer(media or NO_MEDIA, np.uint8)),
        ],
    ).exec()
    if reply.has_error():
        message = reply.error().message()
        raise ServerStoppingError(message) if STOPPING in message else ConnectionError(message)
    return pb_utils.get_output_tensor_by_name(reply, "OUTCOMES").as_numpy().tobytes()


def read_request(request):
    """(Options, Query) of a request. Raises RefusedError."""
    tensors = {tensor.name(): tensor.as_numpy().ravel() for tensor in request.inputs()}
    flags = {name: bool(tensors[name][0]) for name in FLAGS if name in tensors}
    exclude = tensors.get("exclude_input_in_output")
    options = Options(exclude_input_in_output=None if exclude is None else bool(exclude[0]), **flags)
    options.check()
    parameters = json.loads(request.parameters() or "{}")
    own = {key: value for key, value in parameters.items() if not key.startswith(RESERVED)}
    query = Query(
        text=read_text(tensors, "text_input"),
        messages=read_text(tensors, "messages"),
        images=tuple(tensors.get("image", ())),
        # As in vLLM's backend, parameters of the request itself count if there is no input of that name.
        sampling_parameters=read_text(tensors, "sampling_parameters") or json.dumps(own),
        logprobs=options.return_logprobs or options.return_cumulative_logprob,
        id=request.request_id(),
        priority=int(tensors["priority"][0]) if "priority" in tensors else 0,
    )
    return options, query


def read_text(tensors, name):
    if name not in tensors:
        return None
    try:
        return tensors[name][0].decode()
    except UnicodeDecodeError as error:
        raise RefusedError("invalid_argument", f"'{name}' is not UTF-8: {error}") from error


def response(outputs):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in outputs.items()])


def error_response(reason, message):
    code = getattr(pb_utils.TritonError, CODES[reason])
    text = f"[{reason.upper()}] {message}"  # gRPC streams pass on the text alone
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code))
