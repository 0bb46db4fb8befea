"""`splitpoint chat`: asks a running stack turn by turn, and shows what each turn took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from splitpoint.client import Client, Generation
from splitpoint.client.answers import Completion
from splitpoint.client.requests import GenerateOptions
from splitpoint.config import DEFAULT_ADDRESS, counted
from splitpoint.errors import (
    Cancelled,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    SplitpointError,
)
from splitpoint.options.option import Option
from splitpoint.transport.tls import client_identity
from splitpoint_cli.chat import terminal
from splitpoint_cli.chat.conversation import Command, Conversation, Turn, check_known, entries
from splitpoint_cli.files import check_output, write_private_json
from splitpoint_cli.options import Address, CaFile, TokenFile, configurable, of
from splitpoint_cli.output import AsJson, OutputFile, hand_over, print_error, with_exit_codes
from splitpoint_cli.request.generate import tell_retry
from splitpoint_cli.request.options import RequestOptions, request_of

SYSTEM: Option[str] = Option(
    "system",
    str,
    "",
    "System prompt, before the first message; absent: none.",
    unit="TEXT",
)
MAX_TOKENS: Option[int | None] = Option(
    "max-tokens",
    int,
    None,
    "Generate at most this many tokens in a turn; absent: until the context is full.",
    unit="N",
    least=1,
)
EXPLAIN = Option(
    "explain",
    bool,
    False,
    "Print what each turn took and why on stderr; a terminal gets it anyway.",
)


@dataclass(frozen=True, slots=True)
class ChatOptions(RequestOptions):
    """Values of the declared options of `splitpoint chat`."""

    system: str = of(SYSTEM)
    max_tokens: int | None = of(MAX_TOKENS)
    explain: bool = of(EXPLAIN)


@with_exit_codes
@configurable
def chat(
    *,
    given: ChatOptions,
    address: Address = DEFAULT_ADDRESS,
    ca: CaFile = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
    output: OutputFile = None,
) -> None:
    """Talk with a model: each line is a message, lines with a slash are commands (/help).

    Reads a terminal or a pipe. From a pipe it ends at the first error.
    """
    request = request_of(given, max_tokens=given.max_tokens)
    identity = client_identity(ca=ca, token_file=token_file)
    conversation = Conversation(given.system)
    with Client(
        address, identity=identity, retry_seconds=given.retry_seconds, on_retry=tell_retry
    ) as client:
        talk = Talk(client, request, conversation, streams=not as_json, tells=given.explain)
        talk.greet()
        talk.run()
    hand_over(conversation.report(), _nothing, as_json=as_json, output=output)


def _nothing() -> None:
    """The answers were shown as they came."""


@dataclass(slots=True)
class Talk:
    """One run of the command. `streams`: show text; `tells`: figures without a terminal, too."""

    client: Client
    options: GenerateOptions
    conversation: Conversation
    streams: bool
    tells: bool
    saved: Path | None = None

    def greet(self) -> None:
        """Ask for the model, and tell a person of it.

        Raises FailedPrecondition if it has no chat template.
        """
        model = self.client.get_model(self.options.get("model") or "")
        if not model.has_chat_template:
            raise FailedPrecondition(
                f"{model.name} has no chat template; `splitpoint generate` continues plain text, "
                "and the scheduler takes a template by --chat-template",
                reason="NO_CHAT_TEMPLATE",
            )
        if terminal.is_interactive():
            context = counted(model.context_length, "token")
            terminal.say(f"{model.name}, context {context}; /help lists commands, Ctrl-D leaves")

    def run(self) -> None:
        """Answer until the input ends. A terminal is told of an error, a pipe ends by it."""
        for entry in entries(terminal.read_line):
            try:
                if not isinstance(entry, Command):
                    self._ask(entry)
                elif not self._obey(entry):
                    return
            except SplitpointError as error:
                if not terminal.is_interactive():
                    raise
                print_error(error)

    def _ask(self, question: str) -> None:
        """Stream one answer into the conversation; Ctrl-C keeps what came of it."""
        parts: list[str] = []
        messages = self.conversation.messages(question)
        with (
            self.client.chat(messages, **self.options) as generation,
            terminal.closed_by_ctrl_c(generation) as was_stopped,
        ):
            try:
                completion = self._receive(generation, parts)
            except Cancelled:
                if not was_stopped:
                    raise
                if not terminal.is_interactive():
                    raise Cancelled("interrupted") from None
                completion = None
        self.conversation.turns.append(Turn(question, "".join(parts), completion))
        if completion is None:
            terminal.say("stopped")
        elif self.tells or (self.streams and terminal.is_told_figures()):
            terminal.show_figures(completion)

    def _receive(self, generation: Generation, parts: list[str]) -> Completion:
        """Return the answer; put its text into `parts` as it comes, and show it."""
        try:
            for event in generation:
                if isinstance(event, Completion):
                    return event
                parts.append(event.text)
                if self.streams:
                    terminal.show_text(event.text)
        finally:
            # An error on stderr, and the next prompt, start on their own line.
            if parts and self.streams:
                terminal.end_line()
        raise Internal("the generation ended without an answer")

    def _obey(self, command: Command) -> bool:
        """Return False if the command ends the talk. Raises InvalidArgument for an unknown one."""
        check_known(command)
        obeys: dict[str, Callable[[str], None]] = {
            "/system": self._system,
            "/reset": self._reset,
            "/save": self._save,
            "/stats": lambda _: terminal.show_stats(self.conversation.turns),
            "/help": lambda _: terminal.show_help(),
        }
        if command.name == "/quit":
            return False
        obeys[command.name](command.argument)
        return True

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = "" if text == "-" else text
        terminal.say(f"system prompt: {self.conversation.system or 'none'}")

    def _reset(self, _: str) -> None:
        count = len(self.conversation.turns)
        self.conversation.turns.clear()
        terminal.say(f"forgot {counted(count, 'turn')}")

    def _save(self, name: str) -> None:
        path = Path(name).expanduser() if name else self.saved
        if path is None:
            raise InvalidArgument("/save needs the name of a file", field="save")
        check_output(path, "save")
        if path.exists() and path != self.saved:
            raise InvalidArgument(f"{path} exists; name another file", field="save")
        write_private_json(path, self.conversation.report())
        self.saved = path
        terminal.say(f"saved {counted(len(self.conversation.turns), 'turn')} to {path}")
