"""`glassblock jacobian`: norms of Jacobians over layers and tokens, as a table and as a picture."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from glassblock.errors import InvalidValue, TooLarge
from glassblock.wire.audits import Progress
from glassblock.wire.jacobians import (
    CHEAP_NORMS,
    Certificate,
    JacobianNorm,
    JacobianPart,
    JacobiansAnswer,
    TextStates,
)
from glassblock.wire.values import BytesRead, PlacementName, Sample

from glassblock_client.cli.connection import CheckpointArgument, DeviceOption, TimeoutOption, UrlOption, connected_to
from glassblock_client.cli.family import FamilyFileOption, FamilyOption, TowerOption, read_family_row
from glassblock_client.cli.files import require_writable, write_whole
from glassblock_client.cli.inputs import SampleOption, SeedOption, TextOption, TokensOption, chosen_text
from glassblock_client.cli.jacobian_plot import SUFFIXES, picture, require_drawable, require_matplotlib
from glassblock_client.cli.jacobian_tables import layer_table, proof, token_table
from glassblock_client.cli.layer_inputs import LayerInputs, read_layer_inputs
from glassblock_client.cli.lists import expert_of, numbers_of, words_of
from glassblock_client.cli.run import FormatOption
from glassblock_client.cli.screen import show
from glassblock_client.cli.streams import tell
from glassblock_client.client import Client
from glassblock_client.exchange import compose
from glassblock_client.jobs import OnProgress
from glassblock_client.progress import progress_bar

SAME_X = "x: every layer was given the same"


def jacobian(
    context: typer.Context,
    path: CheckpointArgument,
    *,
    layers: Annotated[
        str | None, typer.Option(metavar="0-29|3,7,...", help="Which layers; all when left out.", show_default=False)
    ] = None,
    family: FamilyOption = None,
    family_file: FamilyFileOption = None,
    tower: TowerOption = None,
    part: Annotated[JacobianPart, typer.Option(help="Which function is differentiated.")] = "block",
    expert: Annotated[
        str | None,
        typer.Option(
            metavar="N|shared",
            help="Of a mixture: this network, at every token. Each at its own tokens when left out.",
            show_default=False,
        ),
    ] = None,
    norms: Annotated[
        str | None,
        typer.Option(metavar="NORM,...", help=f"Of {', '.join(get_args(JacobianNorm))}.", show_default=False),
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(metavar="PLACEMENT,...", help="The norm elsewhere; several side by side.", show_default=False),
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input",
            metavar="FILE",
            help="x: .npy, or .safetensors with x, or layers.N.x for each layer; token_ids name its rows.",
            show_default=False,
        ),
    ] = None,
    token_ids: Annotated[
        str | None,
        typer.Option(
            metavar="ID,...",
            help="A text as token ids; see --states.",
            show_default=False,
        ),
    ] = None,
    text: TextOption = None,
    tokens: TokensOption = None,
    states: Annotated[
        TextStates | None,
        typer.Option(
            help="Of a text: what the model makes of it at each layer, or its embedding rows. Reached with --text, "
            "and of attention, a mixture and a layer, when left out.",
            show_default=False,
        ),
    ] = None,
    sample: SampleOption = None,
    seed: SeedOption = None,
    tolerance: Annotated[float, typer.Option(help="How narrow the bracket of a spectral norm is to be.")] = 0.01,
    certificate: Annotated[Certificate, typer.Option(help="Of its upper bound.")] = "probabilistic",
    depth: Annotated[
        bool, typer.Option("--depth", help="Also the chain of these layers' blocks; with --part layer, of the layers.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help=f"Write a picture: {', '.join(SUFFIXES)}.", readable=False, show_default=False
        ),
    ] = None,
    answer_format: FormatOption = "text",
    url: UrlOption = None,
    timeout: TimeoutOption = None,
    device: DeviceOption = None,
) -> None:
    """Show norms of Jacobians per layer and token, each with how it was had.

    Frobenius norm, trace and radial gain are exact for every token; the spectral norm stands
    between two bounds.
    """
    if plot is not None:
        require_matplotlib(plot)
        require_writable(plot, option="--plot")
    row = read_family_row(family, family_file)
    given = None if input_file is None else read_layer_inputs(input_file)
    if sum(source is not None for source in (input_file, token_ids, text, tokens, sample)) != 1:
        raise InvalidValue(
            "give one of --input FILE, --sample ROWS, --text TEXT, --tokens FILE and --token-ids ID,...", field="input"
        )
    worded: dict[str, Any] = {} if text is tokens is None else chosen_text(None, text, tokens)
    if token_ids is not None:
        worded = {"token_ids": numbers_of(token_ids, "--token-ids")}
    if states is not None and not worded:
        raise InvalidValue("--states has no effect without a text", field="states", hint="give --text or --tokens")
    drawn = None if sample is None else compose(Sample, rows=sample, seed=seed or 0)
    wanted = CHEAP_NORMS if norms is None else cast("tuple[JacobianNorm, ...]", words_of(norms, "--norms"))
    if plot is not None:
        require_drawable(part, wanted, depth=depth)
    places = None if placement is None else _placements(placement)
    network = expert_of(expert)
    with (
        connected_to(context, path, url=url, timeout=timeout, device=device) as (client, name),
        progress_bar(f"differentiating {name}") as advance,
    ):
        counted = family is not None or row is not None or tower is not None
        chosen = _chosen_layers(client, name, layers, given, counted=counted)

        def ask(
            asked: Sequence[int],
            of: Client = client,
            *,
            norms: tuple[JacobianNorm, ...] = wanted,
            depth: bool = False,
        ) -> JacobiansAnswer:
            return of.jacobians(
                name,
                asked or None,
                family=family,
                family_row=row,
                tower=tower,
                part=part,
                expert=network,
                placement=places,
                x=None if given is None else given.of(asked[0] if asked else 0),
                states=states,
                **worded,
                sample=drawn,
                norms=norms,
                tolerance=tolerance,
                certificate=certificate,
                seed=seed or 0,
                depth=depth,
            ).answer

        answers = _asked(ask, chosen, advance, depth=depth, as_job=client.as_job(advance))
    answer = _together(answers, given)
    if answer_format == "json":
        sys.stdout.write(answer.model_dump_json(indent=2) + "\n")
    else:
        one = len(answer.layers) == 1 and bool(answer.layers[0].tokens)
        show([proof(answer), token_table(answer) if one else layer_table(answer)])
    if plot is not None:  # last: what was long in coming is not lost with a picture that cannot be made
        write_whole(plot, [picture(answer, plot.suffix)])
        tell(f"the picture is in {plot}")


def _asked(
    ask: Callable[..., JacobiansAnswer], layers: Sequence[int], advance: OnProgress, *, depth: bool, as_job: Client
) -> list[JacobiansAnswer]:
    """The chain where it is wanted, then layer by layer; of a text that is run, what comes after the first at once.

    Where the layers are for the service to count, all at once.
    """
    if not layers:
        return [ask((), as_job, depth=depth)]
    answers: list[JacobiansAnswer] = []
    if depth:  # first: what it refuses is told before the rest is worked on
        advance(Progress(done=0, total=len(layers) + 1, message="depth"))
        # One norm of the layers is the least that can be asked; what is wanted of them follows.
        answers.append(ask(layers, norms=("frobenius",), depth=True).model_copy(update={"layers": ()}))
    for number, layer in enumerate(layers):
        advance(Progress(done=number + depth, total=len(layers) + depth, message=f"layer {layer}"))
        answers.append(ask([layer]))
        if number == 0 and answers[-1].states == "reached" and len(layers) > 2:
            # Asked layer by layer, the text would pass the layers below anew for each; together it passes them once.
            with suppress(TooLarge):
                return [*answers, ask(layers[1:], as_job)]
    return answers


def _together(answers: Sequence[JacobiansAnswer], given: LayerInputs | None) -> JacobiansAnswer:
    """One answer of those of single layers."""
    first = answers[-1]  # any of them: they differ in their layers, and the first may be of the chain
    notes = dict.fromkeys(note for answer in answers for note in answer.notes)
    layers = tuple(layer for answer in answers for layer in answer.layers)
    own = first.states == "reached" or (given is not None and given.per_layer)
    said = any(note.startswith(SAME_X) for note in notes)  # of several layers at once, the service says it
    if not own and not said and len(answers) > 1 and len({layer.layer for layer in layers}) > 1:
        notes |= {f"{SAME_X} rows; only the first is entered by them in the model": None}
    ids = first.token_ids if given is None else given.token_ids
    every = (layer for layer in layers if layer.tokens and layer.rows is None)
    if ids is not None and any(len(layer.tokens) != len(ids) for layer in every):
        raise InvalidValue(f"--input names {len(ids)} tokens, and x has another number of rows", field="token_ids")
    return first.model_copy(
        update={
            "layers": layers,
            "depth": answers[0].depth,
            "notes": tuple(notes),
            "token_ids": ids,
            "read": BytesRead(
                bytes=sum(answer.read.bytes for answer in answers),
                tensors=sum(answer.read.tensors for answer in answers),
            ),
        }
    )


def _chosen_layers(
    client: Client, name: str, layers: str | None, given: LayerInputs | None, *, counted: bool
) -> tuple[int, ...]:
    """Which layers; none where all are meant and only the service can count them: of another family than the config's.

    Raises:
        InvalidValue: `--layers` is none, or is needed.
    """
    if layers is not None:
        return numbers_of(layers, "--layers")
    if not counted:
        return tuple(range(_layer_count(client, name)))
    if given is not None and given.per_layer:
        raise InvalidValue("--input holds a tensor for each layer", field="--layers", hint="give --layers too")
    return ()


def _layer_count(client: Client, name: str) -> int:
    layers = client.checkpoint(name).layers
    if not layers:
        raise InvalidValue(
            f"{name} does not say how many layers it has",
            field="--layers",
            hint="give --layers, or --family where its config names none",
        )
    return layers


def _placements(text: str) -> tuple[PlacementName, ...]:
    words = words_of(text, "--placement")
    for word in words:
        if word not in get_args(PlacementName):
            raise InvalidValue(f"--placement: no placement {word!r}", field="placement", known=get_args(PlacementName))
    return cast("tuple[PlacementName, ...]", words)
