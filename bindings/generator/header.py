"""Reads the public header with libclang into plain data, the content of cuflash.json.

A type is a name ("int32_t", "cuflash_problem_t") or {"pointer": type, "const": true where the
pointee is}. What an ABI must not hold is refused here, all findings at once.
"""
from __future__ import annotations

import subprocess
from pathlib import Path

from clang.cindex import (
    Cursor,
    CursorKind,
    Diagnostic,
    Index,
    StorageClass,
    TokenKind,
    TranslationUnit,
    Type,
    TypeKind,
)

# The ELF version node of each function. A function added after 0.7 gets the node of its release.
ELF_NODE = "CUFLASH_0.7"

# The types that have one size and one meaning in every language, compiler and platform.
SCALARS = {"int32_t", "uint32_t", "int64_t", "uint64_t", "size_t", "float"}
# Never by value: void has none, and the sign of char depends on the processor.
POINTEES = {"void", "char"}


class HeaderError(Exception):
    """The header holds something that the ABI rules forbid."""


def read_header(path: Path) -> dict:
    return _Reader(path).read()


def _compiler_include() -> str:
    """The directory of stddef.h and stdint.h: PyPI's libclang comes without its own."""
    command = ["gcc", "-print-file-name=include"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _text(comment: str | None) -> str:
    """The words of a doc comment; line breaks are the formatter's and mean nothing."""
    if not comment:
        return ""
    body = comment.removeprefix("/**").removeprefix("<").removesuffix("*/")
    # The begin or the end of a doxygen group documents no declaration.
    if body.lstrip().startswith(("@defgroup", "@}")):
        return ""
    lines = (line.strip().removeprefix("*") for line in body.splitlines())
    return " ".join(" ".join(lines).split())


class _Reader:
    def __init__(self, path: Path):
        self.path = path
        self.problems: list[str] = []
        self.structs: set[str] = set()  # typedef names of complete structs
        self.names: set[str] = set()  # typedef names of everything else
        self.result: dict = {
            "macros": {}, "typedefs": [], "enums": [], "structs": [], "functions": []}

    def refuse(self, cursor: Cursor, message: str) -> None:
        self.problems.append(f"{self.path.name}:{cursor.location.line}: {message}")

    def read(self) -> dict:
        unit = Index.create().parse(
            str(self.path),
            args=["-x", "c", "-std=c99", "-isystem", _compiler_include()],
            options=TranslationUnit.PARSE_DETAILED_PROCESSING_RECORD,
        )
        errors = [str(d) for d in unit.diagnostics if d.severity >= Diagnostic.Warning]
        if errors:
            raise HeaderError("\n".join(errors))
        visitors = {
            CursorKind.MACRO_DEFINITION: self.macro,
            CursorKind.TYPEDEF_DECL: self.typedef,
            CursorKind.ENUM_DECL: self.enum,
            CursorKind.STRUCT_DECL: self.struct,
            CursorKind.FUNCTION_DECL: self.function,
        }
        ignored = {CursorKind.INCLUSION_DIRECTIVE, CursorKind.MACRO_INSTANTIATION}
        for cursor in unit.cursor.get_children():
            if cursor.location.file is None or cursor.location.file.name != str(self.path):
                continue
            if cursor.kind in visitors:
                visitors[cursor.kind](cursor)
            elif cursor.kind not in ignored:
                self.refuse(cursor, f"a {cursor.kind.name} has no place in the ABI")
        for struct in self.result["structs"]:
            if not struct["name"]:
                self.problems.append(f"struct {struct['tag']} has no typedef")
        if self.problems:
            raise HeaderError("\n".join(self.problems))
        return self.result

    def comment(self, cursor: Cursor, what: str) -> str:
        text = _text(cursor.raw_comment)
        if not text:
            self.refuse(cursor, f"{what} has no doc comment")
        return text

    # ---- declarations --------------------------------------------------------------------------

    def macro(self, cursor: Cursor) -> None:
        """Integer constants (the version) are kept; guards and attributes are the header's own."""
        tokens = list(cursor.get_tokens())[1:]
        if len(tokens) == 1 and tokens[0].kind == TokenKind.LITERAL:
            self.result["macros"][cursor.spelling] = int(tokens[0].spelling, 0)

    def typedef(self, cursor: Cursor) -> None:
        name, target = cursor.spelling, cursor.underlying_typedef_type
        entry: dict = {"name": name}
        pointee = target.get_pointee() if target.kind == TypeKind.POINTER else None
        if pointee is not None and pointee.get_canonical().kind == TypeKind.FUNCTIONPROTO:
            entry.update(kind="callback", **self.signature(cursor, name, pointee.get_canonical()))
        elif pointee is not None and pointee.get_canonical().kind == TypeKind.RECORD:
            entry.update(kind="opaque", tag=pointee.get_canonical().get_declaration().spelling)
        elif target.get_canonical().kind == TypeKind.RECORD:
            tag = target.get_canonical().get_declaration().spelling
            for struct in self.result["structs"]:
                if struct["tag"] == tag:
                    struct["name"] = name
            self.structs.add(name)
            return
        else:
            entry.update(kind="alias", type=self.type(cursor, name, target))
        entry["comment"] = self.comment(cursor, name)
        self.names.add(name)
        self.result["typedefs"].append(entry)

    def enum(self, cursor: Cursor) -> None:
        # libclang's spelling of an enum without a tag depends on its version.
        if not cursor.spelling.isidentifier():
            self.refuse(cursor, "an enum without a tag: bindings cannot name its constants")
            return
        constants = [c for c in cursor.get_children() if c.kind == CursorKind.ENUM_CONSTANT_DECL]
        comments = {c.spelling: c.raw_comment for c in constants}
        # libclang loses a trailing comment where the formatter broke the line after the "=".
        for token in cursor.get_tokens():
            if token.kind == TokenKind.COMMENT and token.spelling.startswith("/**<"):
                owner = [c for c in constants if c.extent.start.offset < token.extent.start.offset]
                comments[owner[-1].spelling] = token.spelling
        values = [
            {"name": c.spelling, "value": c.enum_value, "comment": _text(comments[c.spelling])}
            for c in constants
        ]
        self.result["enums"].append({
            "tag": cursor.spelling,
            "comment": self.comment(cursor, f"enum {cursor.spelling}"),
            "values": values,
        })

    def struct(self, cursor: Cursor) -> None:
        if not cursor.is_definition():
            return  # the opaque struct behind a handle
        tag, layout = cursor.spelling, cursor.type
        fields, end = [], 0
        for member in cursor.get_children():
            if member.kind != CursorKind.FIELD_DECL:
                self.refuse(member, f"struct {tag}: a nested {member.kind.name}")
                continue
            where = f"{tag}.{member.spelling}"
            if member.is_bitfield():
                self.refuse(member, f"{where} is a bit-field")
            field_type, length = member.type, 0
            if field_type.kind == TypeKind.CONSTANTARRAY:
                length, field_type = field_type.element_count, field_type.element_type
            offset = layout.get_offset(member.spelling) // 8
            if offset != end:
                self.refuse(member, f"{where}: a hole of {offset - end} bytes before it")
            end = offset + member.type.get_size()
            fields.append({
                "name": member.spelling,
                "type": self.type(member, where, field_type, in_struct=True),
                "length": length,
                "offset": offset,
                "size": member.type.get_size(),
                "comment": self.comment(member, where),
            })
        if end != layout.get_size():
            hole = layout.get_size() - end
            self.refuse(cursor, f"struct {tag}: a hole of {hole} bytes at its end")
        self.result["structs"].append({
            "name": "",  # its typedef follows
            "tag": tag,
            "size": layout.get_size(),
            "alignment": layout.get_align(),
            "comment": self.comment(cursor, f"struct {tag}"),
            "fields": fields,
        })

    def function(self, cursor: Cursor) -> None:
        name = cursor.spelling
        if cursor.is_definition() or cursor.storage_class == StorageClass.STATIC:
            self.refuse(cursor, f"{name} is defined in the header: other languages cannot call it")
        prototype = cursor.type.get_canonical()
        if prototype.kind != TypeKind.FUNCTIONPROTO:
            self.refuse(cursor, f"{name} has no prototype")
            return
        self.result["functions"].append({
            "name": name,
            **self.signature(cursor, name, cursor.type),
            "elf_node": ELF_NODE,
            "comment": self.comment(cursor, name),
        })

    def signature(self, cursor: Cursor, name: str, prototype: Type) -> dict:
        if prototype.is_function_variadic():
            self.refuse(cursor, f"{name} is variadic")
        parameters = [c for c in cursor.get_children() if c.kind == CursorKind.PARM_DECL]
        for parameter in parameters:
            if not parameter.spelling:
                self.refuse(cursor, f"{name} has a parameter without a name")
        returned = prototype.get_result()
        return {
            "return": "void" if returned.kind == TypeKind.VOID
                      else self.type(cursor, f"{name}: return", returned),
            "parameters": [
                {"name": p.spelling, "type": self.type(p, f"{name}: {p.spelling}", p.type)}
                for p in parameters
            ],
        }

    # ---- types ---------------------------------------------------------------------------------

    def type(self, cursor: Cursor, where: str, spelled: Type, in_struct: bool = False) -> object:
        """The type as data; by value only fixed-width scalars, our own names, structs in
        structs."""
        if spelled.kind == TypeKind.POINTER:
            return self.pointer(cursor, where, spelled.get_pointee())
        name = spelled.spelling.removeprefix("const ")
        if name in SCALARS or name in self.names or (in_struct and name in self.structs):
            return name
        self.refuse(cursor, f"{where}: type {spelled.spelling} is not allowed in the ABI")
        return name

    def pointer(self, cursor: Cursor, where: str, pointee: Type) -> dict:
        name = pointee.spelling.removeprefix("const ")
        known = name in POINTEES or name in SCALARS or name in self.names or name in self.structs
        if not known:
            self.refuse(cursor, f"{where}: pointer to {pointee.spelling} is not allowed in the ABI")
        return {"pointer": name, "const": pointee.is_const_qualified()}
