import pytest
from epd_orchestrator.sampling_parameters import Parameters, parse
from epd_scheduler.protocol import Sampling
from epd_scheduler.request import RefusedError

VOCAB = 100


def refusal(text: str) -> str:
    with pytest.raises(RefusedError) as caught:
        parse(text, VOCAB)
    assert caught.value.reason == "invalid_argument"
    return str(caught.value)


@pytest.mark.parametrize("text", [None, "", "{}", '{"temperature": null, "stop": null}'])
def test_nothing_given_means_greedy_defaults(text: str | None) -> None:
    assert parse(text, VOCAB) == Parameters(Sampling(), None, ())


def test_every_key_is_taken_over() -> None:
    text = """{"max_tokens": 9, "min_tokens": 2, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3,
      "repetition_penalty": 1.1, "presence_penalty": -0.5, "frequency_penalty": 0.5, "stop": ["a", "b", "a"],
      "stop_token_ids": [7, 8, 7], "ignore_eos": true, "logprobs": 2, "logit_bias": {"4": -100, "5": 1.5}}"""
    sampling = Sampling(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        seed=3,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.5,
        min_tokens=2,
        stop_token_ids=(7, 8),
        ignore_eos=True,
        logprobs=2,
        logit_bias={4: -100.0, 5: 1.5},
    )
    assert parse(text, VOCAB) == Parameters(sampling, 9, ("a", "b"))


def test_numbers_may_be_strings_and_stop_one_string() -> None:
    got = parse('{"temperature": "0.5", "max_tokens": "10", "seed": "1", "stop": "end"}', VOCAB)
    assert (got.sampling.temperature, got.max_tokens, got.sampling.seed, got.stop) == (0.5, 10, 1, ("end",))


def test_top_k_of_minus_one_is_off_and_a_tiny_temperature_greedy() -> None:
    got = parse('{"top_k": -1, "temperature": 1e-9}', VOCAB).sampling
    assert (got.top_k, got.temperature, got.seed) == (0, 0.0, 0)


def test_sampling_without_a_seed_gets_one_of_its_own() -> None:
    seeds = {parse('{"temperature": 1}', VOCAB).sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_an_unknown_key_is_refused_with_the_nearest_name() -> None:
    assert "unknown key 'max_token'; did you mean 'max_tokens'?" in refusal('{"max_token": 3}')
    assert "known keys: temperature" in refusal('{"zzz": 3}')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"temperature": -0.1}', "'temperature' must be at least 0, got -0.1"),
        ('{"top_p": 0}', "'top_p' must be more than 0 and at most 1, got 0"),
        ('{"top_p": 1.01}', "'top_p' must be more than 0 and at most 1, got 1.01"),
        ('{"min_p": 2}', "'min_p' must be at least 0 and at most 1"),
        ('{"repetition_penalty": 0}', "'repetition_penalty' must be at least 1e-20 and at most 1e+20, got 0"),
        ('{"repetition_penalty": 1e-300}', "'repetition_penalty' must be at least 1e-20"),
        ('{"presence_penalty": 3}', "'presence_penalty' must be at least -2 and at most 2"),
        ('{"max_tokens": 0}', "'max_tokens' must be at least 1, got 0"),
        ('{"min_tokens": 5, "max_tokens": 4}', "'min_tokens' (5) must not exceed 'max_tokens' (4)"),
        ('{"top_k": -2}', "'top_k' must be at least -1"),
        ('{"top_k": 18446744073709551616}', "'top_k' must be at most 9223372036854775807 in magnitude"),
        ('{"top_k": 4294967296}', "'top_k' must be at least -1 and at most 2.14748e+09"),
        ('{"min_tokens": 4294967296}', "'min_tokens' must be at least 0 and at most 2.14748e+09"),
        ('{"seed": 1' + "0" * 400 + "}", "'seed' must be at most 9223372036854775807 in magnitude"),
        ('{"seed": -1}', "'seed' must be at least 0"),
        ('{"logprobs": 21}', "'logprobs' must be at least 0 and at most 20"),
        ('{"stop_token_ids": [100]}', "'stop_token_ids' must be at least 0 and at most 99"),
        ('{"logit_bias": {"100": 1}}', "'logit_bias' must be at least 0 and at most 99"),
        ('{"logit_bias": {"1": 101}}', "'logit_bias' must be at least -100 and at most 100"),
        ('{"max_tokens": true}', "'max_tokens' must be an integer, got a boolean"),
        ('{"max_tokens": 1.5}', "'max_tokens' must be an integer, got a number"),
        ('{"max_tokens": "x"}', "'max_tokens' must be an integer, got 'x'"),
        ('{"temperature": true}', "'temperature' must be a number, got a boolean"),
        ('{"temperature": "warm"}', "'temperature' must be a number, got 'warm'"),
        ('{"temperature": "nan"}', "'temperature' must be finite"),
        ('{"temperature": "inf"}', "'temperature' must be finite"),
        ('{"temperature": NaN}', "NaN and Infinity are not JSON"),
        ('{"ignore_eos": 1}', "'ignore_eos' must be true or false, got an integer"),
        ('{"stop": 3}', "'stop' must be a string or an array of strings"),
        ('{"stop": ["a", 3]}', "'stop' must be a string or an array of strings"),
        ('{"stop": ""}', "'stop' must not hold an empty string"),
        ('{"stop_token_ids": 3}', "'stop_token_ids' must be an array"),
        ('{"logit_bias": [1]}', "'logit_bias' must be an object"),
        ("[1]", "must be a JSON object, got an array"),
        ("{", "not valid JSON"),
    ],
)
def test_what_is_out_of_range_or_mistyped_is_refused_by_name(text: str, message: str) -> None:
    assert message in refusal(text)


def test_a_number_too_large_for_a_float_is_refused() -> None:
    assert "temperature" in refusal('{"temperature": 1' + "0" * 400 + "}")
    assert parse('{"temperature": 1e300}', VOCAB).sampling.temperature < 3e38  # float32


@pytest.mark.parametrize("key", ["max_tokens", "min_tokens", "top_k", "seed"])
def test_an_accepted_integer_fits_a_message_and_a_tensor(key: str) -> None:
    for bits in (31, 32, 63, 64, 65, 2000):
        try:
            sampling = parse(f'{{"{key}": {2**bits - 1}, "temperature": 1}}', VOCAB).sampling
        except RefusedError:
            continue
        assert max(sampling.min_tokens, sampling.top_k, sampling.seed) < 2**63
