"""Compiles Python functions to schemas: branches of a program become modules of a prompt.

Source: Prompt Cache §3.2.4. ``if`` becomes a module, ``if``/``else`` and ``match`` become a union,
and a call of another prompt function becomes a nested module. A decorator gives parameters their
lengths. A constant argument of a call becomes text of its module, and decides its conditions.

Deviations from the public reference: ``elif``, ``else`` and every statement of a branch count.
Names of modules come from the text of the conditions, so equal functions give equal schemas. Code
that cannot be compiled is refused with its line.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, get_type_hints

from kvrag.arguments import shown
from kvrag.chunk import normalise
from kvrag.errors import ParameterError
from kvrag.pml.parser import MAX_LENGTH, RESERVED, check_name
from kvrag.pml.schema import Location, Module, Node, Parameter, Schema, Text, Union

F = TypeVar("F", bound=Callable[..., str])

_SUPPORTED = (
    "a prompt function may hold texts, f-strings of its parameters, if/else, match, calls of other "
    "prompt functions, and return of its text"
)
_SCHEMA = "__kvrag_schema__"


class Length:
    """The most tokens that a parameter may take: ``city: Annotated[str, Length(8)]``.

    Parameters
    ----------
    tokens
        1 to 65,536.
    """

    def __init__(self, tokens: int) -> None:
        if type(tokens) is not int or not 1 <= tokens <= MAX_LENGTH:
            raise ParameterError(
                f"Length({shown(tokens)}): expected 1 to {MAX_LENGTH} tokens, a whole number"
            )
        self.tokens = tokens


def prompt(function: F) -> F:
    """Compile a function to a schema. The function itself stays unchanged.

    A prompt function builds its text from statements that are texts (an expression on a line by
    itself), conditions on its untyped or ``bool`` parameters, and calls of other prompt functions.
    Parameters annotated with a `Length` become parameters of the schema. Their defaults are the
    text for prompts that give none.

    An argument of such a call is a constant or a parameter of the caller. A constant becomes text
    and decides conditions. A parameter stays a parameter or condition of the called function.

    Raises
    ------
    PMLError
        For code that cannot be compiled, with file and line.
    ParameterError
        If `function` is not a function.

    Examples
    --------
    >>> from typing import Annotated
    >>> @prompt
    ... def trip(abroad: bool, days: Annotated[str, Length(5)]):
    ...     f"A trip of {days}."
    ...     if abroad:
    ...         "Bring a passport."
    ...     else:
    ...         "Bring a map."
    >>> sorted("/".join(path) for path in schema_of(trip).modules)
    ['abroad', 'not-abroad']
    """
    setattr(function, _SCHEMA, _Compiler(function).schema())
    return function


def schema_of(function: Callable[..., Any]) -> Schema:
    """Return the schema of a prompt function. Raises ParameterError for any other."""
    found = getattr(function, _SCHEMA, None)
    if not isinstance(found, Schema):
        raise ParameterError(
            f"{getattr(function, '__name__', function)!r} is not a prompt function: decorate it "
            "with kvrag.pml.program.prompt"
        )
    return found


_Constant = str | int | float | bool | None


class _Compiler:
    """Compiles one function.

    Parameters
    ----------
    function
        The function.
    constants
        For a call: parameters that it makes constant.
    passed
        For a call: parameters that it passes on, each with its default in the caller.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        constants: Mapping[str, _Constant] | None = None,
        passed: Mapping[str, _Constant] | None = None,
    ) -> None:
        self._constants = dict(constants or {})
        self._passed = dict(passed or {})
        if not inspect.isfunction(function):
            raise ParameterError(
                f"{function!r} is not a prompt function: expected a function written with def, "
                "decorated where it is defined"
            )
        self._function = function
        self._file = inspect.getsourcefile(function) or "<program>"
        try:
            lines, first = inspect.getsourcelines(function)
        except (OSError, TypeError) as error:
            raise Location(self._file, 1, 1).error(
                f"the source of {function.__name__!r} cannot be read",
                "define prompt functions in a file",
            ) from error
        self._first = first
        if function.__name__ == "<lambda>":
            raise Location(self._file, first, 1).error("a lambda has no statements", _SUPPORTED)
        # Errors give columns in the file.
        source = "".join(lines)
        dedented = textwrap.dedent(source)
        self._indent = len(lines[0]) - len(lines[0].lstrip())
        (definition,) = ast.parse(dedented).body
        if not isinstance(definition, ast.FunctionDef):
            raise self._refuse(definition, "an async function")
        self._definition = definition
        self._lengths = self._find_lengths()

    def schema(self) -> Schema:
        check_name(self._definition.name, self._location(self._definition))
        children = self._body(self._definition.body, is_last=True)
        return Schema(self._definition.name, children, (), self._location(self._definition))

    def _location(self, node: ast.AST) -> Location:
        line = getattr(node, "lineno", 1) + self._first - 1
        return Location(self._file, line, getattr(node, "col_offset", 0) + self._indent + 1)

    def _refuse(self, node: ast.AST, what: str) -> Exception:
        return self._location(node).error(f"{what} cannot be compiled to a schema", _SUPPORTED)

    def _find_lengths(self) -> dict[str, int]:
        arguments = self._definition.args
        for special in (arguments.vararg, arguments.kwarg):
            if special is not None:
                raise self._refuse(special, f"the parameter *{special.arg}")
        try:
            hints = get_type_hints(self._function, include_extras=True)
        except (NameError, AttributeError, SyntaxError, TypeError) as error:
            raise self._location(self._definition).error(
                f"an annotation is not known ({error})", "import it where the function is defined"
            ) from error
        return {
            name: metadata.tokens
            for name, hint in hints.items()
            for metadata in getattr(hint, "__metadata__", ())
            if isinstance(metadata, Length)
        }

    def _body(self, statements: list[ast.stmt], *, is_last: bool) -> tuple[Node, ...]:
        """Compile statements. `is_last` means that they end the function."""
        nodes: list[Node] = []
        used: dict[str, int] = {}
        for statement in statements:
            ends = is_last and statement is statements[-1]
            made = [_renamed(node, used) for node in self._statement(statement, ends)]
            if nodes and made:
                # Each statement is a line of the prompt.
                nodes.append(Text("\n", self._location(statement)))
            nodes += made
        seen: set[str] = set()
        for node in nodes:
            if isinstance(node, Parameter) and node.name in seen:
                raise node.location.error(
                    f"{node.name!r} appears twice in one module", "give the second another name"
                )
            if isinstance(node, Parameter):
                seen.add(node.name)
        return tuple(nodes)

    def _statement(self, statement: ast.stmt, is_last: bool) -> list[Node]:
        if isinstance(statement, ast.Pass):
            return []
        if isinstance(statement, ast.Expr):
            return self._text(statement.value)
        if isinstance(statement, ast.Return) and statement.value is not None:
            if not is_last:
                # A prompt could import the code after it, which the function then never reaches.
                raise self._refuse(statement, "a return before the function's end")
            return self._text(statement.value)
        if isinstance(statement, ast.If):
            return self._choice(statement, is_last)
        if isinstance(statement, ast.Match):
            return self._match(statement, is_last)
        raise self._refuse(statement, type(statement).__name__.lower())

    def _text(self, value: ast.expr, *, is_whole: bool = True) -> list[Node]:
        """Compile an expression that gives text: a literal, an f-string, a sum of those, a call.

        A literal that is the whole statement loses its indentation, like a docstring.
        """
        location = self._location(value)
        if isinstance(value, ast.Constant):
            if not isinstance(value.value, str):
                raise self._refuse(value, f"the constant {value.value!r}")
            text = inspect.cleandoc(value.value) if is_whole else value.value
            text = self._words(text, value)
            return [Text(text, location)] if text else []
        if isinstance(value, ast.JoinedStr):
            return [node for part in value.values for node in self._part(part)]
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            summands = (value.left, value.right)
            return [node for one in summands for node in self._text(one, is_whole=False)]
        if isinstance(value, ast.Call):
            return [self._call(value)]
        raise self._refuse(value, ast.unparse(value))

    def _part(self, part: ast.expr) -> list[Node]:
        if isinstance(part, ast.Constant):
            return [Text(self._words(str(part.value), part), self._location(part))]
        assert isinstance(part, ast.FormattedValue)
        if part.conversion != -1 or part.format_spec is not None:
            raise self._refuse(part, "a conversion or format in an f-string")
        if isinstance(part.value, ast.Call):
            return [self._call(part.value)]
        if not isinstance(part.value, ast.Name):
            raise self._refuse(part, ast.unparse(part.value))
        name = part.value.id
        if name in self._constants:
            words = self._words(str(self._constants[name]), part)
            return [Text(words, self._location(part))] if words else []
        if name not in self._lengths:
            raise self._location(part).error(
                f"{name!r} has no length", f"annotate it: {name}: Annotated[str, Length(TOKENS)]"
            )
        check_name(name, self._location(part))
        default = self._passed.get(name, _defaults(self._function).get(name))
        scaffold = "" if default is None else self._words(str(default), part)
        return [Parameter(name, self._lengths[name], scaffold, self._location(part))]

    def _words(self, text: str, node: ast.AST) -> str:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise self._location(node).error(
                "half of a surrogate pair is not a character", "write the character itself"
            ) from error
        return normalise(text)

    def _choice(self, statement: ast.If, is_last: bool) -> list[Node]:
        members: list[Module] = []
        rest: list[ast.stmt] = [statement]
        while len(rest) == 1 and isinstance(rest[0], ast.If):
            branch = rest[0]
            decided = self._decided(branch.test)
            if decided:
                rest = branch.body
                break
            if decided is None:
                name = self._condition(branch.test)
                body = self._body(branch.body, is_last=is_last)
                members.append(Module(name, body, self._location(branch)))
            rest = branch.orelse
        if not members:
            return list(self._body(rest, is_last=is_last))
        if rest:
            name = f"not-{members[0].name}" if len(members) == 1 else "otherwise"
            body = self._body(rest, is_last=is_last)
            members.append(Module(name, body, self._location(rest[0])))
        return [members[0] if len(members) == 1 else self._union(members, statement)]

    def _match(self, statement: ast.Match, is_last: bool) -> list[Node]:
        subject = statement.subject
        is_decided = self._is_decided(subject)
        members = []
        for case in statement.cases:
            if case.guard is not None:
                raise self._refuse(case.guard, "a guard of a case")
            name = _as_name(self._pattern(case.pattern))
            if is_decided:
                if _matches(case.pattern, self._value(subject, self._constants)):
                    return list(self._body(case.body, is_last=is_last))
                continue
            body = self._body(case.body, is_last=is_last)
            members.append(Module(name, body, self._location(case.pattern)))
        return [self._union(members, statement)] if members else []

    def _is_decided(self, expression: ast.expr) -> bool:
        """Return whether an expression has only constants, at least one of them from a call."""
        names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
        return bool(names) and names <= self._constants.keys()

    def _decided(self, test: ast.expr) -> bool | None:
        """Return a condition's value, or None if a prompt decides it."""
        self._condition(test)
        return bool(self._value(test, self._constants)) if self._is_decided(test) else None

    def _value(self, expression: ast.expr, known: Mapping[str, Any]) -> Any:
        """Return the value of an expression of constants, which contains no calls."""
        words = ast.unparse(expression)
        if any(isinstance(node, ast.Call | ast.Lambda) for node in ast.walk(expression)):
            raise self._refuse(expression, words)
        code = compile(ast.Expression(expression), self._file, "eval")
        try:
            return eval(code, {"__builtins__": {}}, dict(known))
        except Exception as error:  # whatever the expression raises
            raise self._location(expression).error(
                f"{words} cannot be computed ({error})",
                "write constants that the function could be called with",
            ) from error

    def _pattern(self, pattern: ast.pattern) -> str:
        if isinstance(pattern, ast.MatchValue) and isinstance(pattern.value, ast.Constant):
            return str(pattern.value.value)
        if isinstance(pattern, ast.MatchSingleton):
            return str(pattern.value)
        if isinstance(pattern, ast.MatchAs) and pattern.pattern is None and pattern.name is None:
            return "otherwise"
        if isinstance(pattern, ast.MatchOr):
            return "-or-".join(self._pattern(one) for one in pattern.patterns)
        raise self._refuse(pattern, "this pattern")

    def _union(self, members: list[Module], statement: ast.stmt) -> Union:
        used: dict[str, int] = {}
        return Union(tuple(_numbered(one, used) for one in members), "", self._location(statement))

    def _condition(self, test: ast.expr) -> str:
        for node in ast.walk(test):
            if isinstance(node, ast.Call | ast.Lambda | ast.Await | ast.NamedExpr):
                raise self._refuse(node, f"the condition {ast.unparse(test)}")
        return _as_name(ast.unparse(test))

    def _call(self, call: ast.Call) -> Module:
        if not isinstance(call.func, ast.Name):
            raise self._refuse(call, ast.unparse(call))
        name = call.func.id
        target = self._known().get(name)
        found = getattr(target, _SCHEMA, None)
        if not isinstance(found, Schema) or target is None:
            raise self._location(call).error(
                f"{name!r} is not a prompt function defined before this one", _SUPPORTED
            )
        children = _Compiler(target, *self._arguments(call, target)).schema().children
        return Module(found.name, children, self._location(call))

    def _arguments(
        self, call: ast.Call, target: Callable[..., Any]
    ) -> tuple[dict[str, _Constant], dict[str, _Constant]]:
        """Return the constants that a call gives, and the defaults of parameters it passes on."""
        unpacked = [one for one in call.args if isinstance(one, ast.Starred)]
        if unpacked or any(one.arg is None for one in call.keywords):
            raise self._refuse(call, f"{ast.unparse(call)}, which unpacks arguments,")
        try:
            bound = inspect.signature(target).bind(
                *call.args, **{str(one.arg): one.value for one in call.keywords}
            )
        except TypeError as error:
            raise self._location(call).error(
                f"{ast.unparse(call)}: {error}",
                "give each parameter without a default a constant, or a parameter of this function",
            ) from error
        own = _defaults(self._function)
        constants = _defaults(target)
        passed: dict[str, _Constant] = {}
        for name, value in bound.arguments.items():
            constants.pop(name, None)
            if isinstance(value, ast.Name) and value.id in self._of_the_prompt():
                passed[name] = self._passed.get(value.id, own.get(value.id))
            else:
                constants[name] = self._constant(value)
        return constants, passed

    def _of_the_prompt(self) -> set[str]:
        """Return the parameters that prompts decide."""
        return set(inspect.signature(self._function).parameters) - self._constants.keys()

    def _constant(self, value: ast.expr) -> _Constant:
        """Return the constant that an argument is."""
        known = {**self._known(), **self._constants}
        names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        if names & self._of_the_prompt():
            raise self._location(value).error(
                f"the argument {ast.unparse(value)} combines a parameter with something else",
                "pass the parameter alone, and write the rest in the function that is called",
            )
        found = self._value(value, {name: known[name] for name in names & known.keys()})
        if not _is_constant(found):
            raise self._location(value).error(
                f"the argument {ast.unparse(value)} is not a constant",
                "pass a text, a number, True, False or None, or a parameter of this function",
            )
        return found  # type: ignore[no-any-return]

    def _known(self) -> Mapping[str, Any]:
        variables = inspect.getclosurevars(self._function)
        return {**variables.globals, **variables.nonlocals}


def _defaults(function: Callable[..., Any]) -> dict[str, _Constant]:
    """Return the parameters' defaults that are constants."""
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if _is_constant(one.default)}


def _is_constant(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _matches(pattern: ast.pattern, value: Any) -> bool:
    """Return whether a pattern, of a supported form, matches a value."""
    if isinstance(pattern, ast.MatchValue):
        assert isinstance(pattern.value, ast.Constant)
        return bool(pattern.value.value == value)
    if isinstance(pattern, ast.MatchSingleton):
        return pattern.value is value
    if isinstance(pattern, ast.MatchOr):
        return any(_matches(one, value) for one in pattern.patterns)
    return True


def _as_name(words: str) -> str:
    """Return a module's name made from a program's words; the same words give the same name."""
    words = normalise(words)
    name = re.sub(r"[^a-zA-Z0-9_.]+", "-", words).strip("-.")
    if name and name != words and not re.fullmatch(r"[\w.\s'\"-]*", words, re.ASCII):
        # Signs were dropped: 'a < b' and 'a > b' must get different names.
        name += "-" + hashlib.blake2b(words.encode(), digest_size=3).hexdigest()
    is_free = (name[:1].isalpha() or name[:1] == "_") and name not in RESERVED
    return name if is_free else f"_{name}"


def _renamed(node: Node, used: dict[str, int]) -> Node:
    """Number sibling modules that would share a name."""
    if isinstance(node, Union):
        return replace(node, members=tuple(_numbered(one, used) for one in node.members))
    return _numbered(node, used) if isinstance(node, Module) else node


def _numbered(module: Module, used: dict[str, int]) -> Module:
    """Return a module with a name that is not counted in `used` yet."""
    count = used[module.name] = used.get(module.name, 0) + 1
    return module if count == 1 else replace(module, name=f"{module.name}-{count}")
