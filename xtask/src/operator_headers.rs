//! C headers of the small operators, made of their table and laid out in `include/aclnnop` of a toolkit.
//!
//! A header has the toolkit's name: that of the operator in snake case, without `Inplace`. Operators share one as
//! [`SHARED`] and [`stem`] say, and a name that CANN spells otherwise stands in [`SPELT`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

const TABLE: &str = "ascend-emu/src/glue/table.rs";

/// Operators whose names begin so stand in one header.
const SHARED: [(&str, &str); 8] = [
    ("RepeatInterleave", "repeat_interleave"),
    ("DropoutGenMask", "dropout_gen_mask"),
    ("ScatterValue", "scatter"),
    ("DivMod", "div"),
    ("Remainder", "remainder"),
    ("Clamp", "clamp"),
    ("PowTensorScalar", "pow"),
    ("PowScalarTensor", "pow"),
];

/// Headers that are not named after their operator in snake case.
const SPELT: [(&str, &str); 11] = [
    ("ArgMax", "argmax"),
    ("ArgMin", "argmin"),
    ("GeGluV3", "geglu"),
    ("IsClose", "isclose"),
    ("IsFinite", "isfinite"),
    ("IsNegInf", "isneginf"),
    ("IsPosInf", "isposinf"),
    ("LogSoftmax", "logsoftmax"),
    ("LogSumExp", "logsumexp"),
    ("ProdDim", "prod"),
    ("VarCorrection", "var"),
];

/// Functions of an operator beside its two phases, as its header declares them.
const BESIDE: [(&str, &str); 1] = [(
    "NpuFormatCast",
    "\n/** The shape in memory and the format of what `srcTensor` is cast to; `dstShape` is the caller's to free. */\n\
     aclnnStatus aclnnNpuFormatCastCalculateSizeAndFormat(\n    const aclTensor *srcTensor,\n    \
     const int dstFormat,\n    const int additionalDtype,\n    int64_t **dstShape,\n    \
     uint64_t *dstShapeSize,\n    int *actualFormat);\n",
)];

/// An operator of the table: its name without `aclnn`, and its parameters, each a name and a kind.
struct Operator<'a> {
    name: &'a str,
    caller: &'a str,
    parameters: Vec<(&'a str, &'a str)>,
}

/// The operators of the table's source.
fn operators(table: &str) -> Result<Vec<Operator<'_>>, String> {
    let mut operators = Vec::new();
    let mut rest = table;
    while let Some(at) = rest.find("fn aclnn") {
        let (before, line) = rest.split_at(at);
        let comment = before.trim_end().lines().next_back().unwrap_or_default();
        let caller = comment.trim().trim_start_matches('/').trim();
        let text = line.strip_prefix("fn aclnn").unwrap_or_default();
        let parts = text.split_once('(').and_then(|(name, rest)| Some((name, rest.split_once(')')?)));
        let Some((name, (parameters, after))) = parts else {
            return Err(format!("{TABLE}: the parameters of aclnn{text:.30} have no end"));
        };
        let parameters =
            parameters.split(',').map(str::trim).filter(|parameter| !parameter.is_empty()).map(|parameter| {
                let pair = parameter.split_once(':');
                let (parameter, kind) =
                    pair.ok_or_else(|| format!("{TABLE}: aclnn{name}: `{parameter}` has no type"))?;
                Ok((parameter.trim().trim_end_matches('_'), kind.trim()))
            });
        operators.push(Operator { name, caller, parameters: parameters.collect::<Result<_, String>>()? });
        rest = after;
    }
    Ok(operators)
}

/// The C type of a kind of parameters, up to the parameter's name.
fn c_type(kind: &str) -> Option<&'static str> {
    Some(match kind {
        "In" | "InPacked" | "InStored" | "OptionalIn" => "const aclTensor *",
        "Ins" => "const aclTensorList *",
        "Out" | "OutStored" | "OptionalOut" | "InOut" | "InOutShared" => "aclTensor *",
        "Scalar" | "OptionalScalar" => "const aclScalar *",
        "Ints" => "const aclIntArray *",
        "Text" => "char *",
        "Type" => "aclDataType ",
        "Flag" => "bool ",
        "i8" => "int8_t ",
        "i32" => "int32_t ",
        "i64" => "int64_t ",
        "u64" => "uint64_t ",
        "f32" => "float ",
        "f64" => "double ",
        _ => return None,
    })
}

/// A name in snake case: `SWhere` is `s_where`, `NonzeroV2` `nonzero_v2`.
fn snake(name: &str) -> String {
    let letters: Vec<char> = name.chars().collect();
    let mut text = String::new();
    for (at, letter) in letters.iter().enumerate() {
        let before = at.checked_sub(1).and_then(|before| letters.get(before));
        let after = letters.get(at + 1);
        let starts =
            before.is_some_and(|c| !c.is_uppercase()) || (before.is_some() && after.is_some_and(|c| c.is_lowercase()));
        if letter.is_uppercase() && starts {
            text.push('_');
        }
        text.extend(letter.to_lowercase());
    }
    text
}

/// The header of an operator is `aclnn_STEM.h`: `Inplace` and the `s` of an operator with a scalar (`Adds` beside
/// `Add`) make no header of their own.
fn stem(name: &str, all: &BTreeSet<&str>) -> String {
    let name = name.strip_prefix("Inplace").unwrap_or(name);
    let spelt = SPELT.iter().find(|(operator, _)| *operator == name);
    let shared = || SHARED.iter().find(|(start, _)| name.starts_with(start));
    if let Some((_, stem)) = spelt.or_else(shared) {
        return (*stem).to_owned();
    }
    match name.strip_suffix('s').filter(|base| all.contains(base)) {
        Some(base) => snake(base),
        None => snake(name),
    }
}

/// The declarations of both phases of an operator.
fn declarations(operator: &Operator<'_>) -> Result<String, String> {
    let Operator { name, caller, parameters } = operator;
    let mut text = format!("\n/** Phase one; what calls it: {caller} */\naclnnStatus aclnn{name}GetWorkspaceSize(\n");
    for (parameter, kind) in parameters {
        let c = c_type(kind).ok_or_else(|| format!("{TABLE}: aclnn{name}: {parameter}: no C type for `{kind}`"))?;
        let _ = writeln!(text, "    {c}{parameter},");
    }
    let _ = write!(
        text,
        "    uint64_t *workspaceSize,\n    aclOpExecutor **executor);\n\n\
         /** Phase two: queues the prepared call on the stream. */\n\
         aclnnStatus aclnn{name}(\n    void *workspace,\n    uint64_t workspaceSize,\n    \
         aclOpExecutor *executor,\n    aclrtStream stream);\n"
    );
    Ok(text)
}

/// The headers of the table's source, by file name.
pub(crate) fn headers(table: &str) -> Result<BTreeMap<String, String>, String> {
    let operators = operators(table)?;
    let names: BTreeSet<&str> = operators.iter().map(|operator| operator.name).collect();
    let mut bodies: BTreeMap<String, String> = BTreeMap::new();
    for operator in &operators {
        let body = bodies.entry(stem(operator.name, &names)).or_default();
        body.push_str(&declarations(operator)?);
        body.extend(BESIDE.iter().filter(|(name, _)| *name == operator.name).map(|(_, text)| *text));
    }
    let header = |(stem, body): (String, String)| {
        let guard = format!("ASCEND_ATTENTION_ACLNNOP_ACLNN_{}_H_", stem.to_uppercase());
        let text = format!(
            "/*\n * Operators around attention that the emulation has (libopapi). Generated by `xtask emu-libs` \
             from\n * {TABLE}.\n */\n#ifndef {guard}\n#define {guard}\n\n#include \"aclnn/aclnn_base.h\"\n\n\
             #ifdef __cplusplus\nextern \"C\" {{\n#endif\n{body}\n#ifdef __cplusplus\n}}\n#endif\n\n#endif\n"
        );
        (format!("aclnn_{stem}.h"), text)
    };
    Ok(bodies.into_iter().map(header).collect())
}

/// Writes the headers into the `include` of a toolkit, in which the others are already. Returns their number.
pub(crate) fn write(root: &Path, include: &Path) -> Result<usize, String> {
    let failed = |path: &Path, error| format!("{}: {error}", path.display());
    let table = root.join(TABLE);
    let table = fs::read_to_string(&table).map_err(|error| failed(&table, error))?;
    let headers = headers(&table)?;
    let folder = include.join("aclnnop");
    fs::create_dir_all(&folder).map_err(|error| failed(&folder, error))?;
    for (name, text) in &headers {
        let own = root.join("include/aclnnop").join(name);
        if own.exists() {
            return Err(format!("{TABLE}: an operator's header is {name}, which {} is already", own.display()));
        }
        let file = folder.join(name);
        fs::write(&file, text).map_err(|error| failed(&file, error))?;
    }
    Ok(headers.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_have_the_names_of_the_toolkit() {
        let all = BTreeSet::from(["Add", "Adds", "Cos", "Sub"]);
        for (name, header) in [
            ("Add", "add"),
            ("Adds", "add"),
            ("InplaceAdds", "add"),
            ("Cos", "cos"),
            ("InplaceCopy", "copy"),
            ("ConstantPadNd", "constant_pad_nd"),
            ("SWhere", "s_where"),
            ("NonzeroV2", "nonzero_v2"),
            ("GeluV2", "gelu_v2"),
            ("RepeatInterleaveIntWithDim", "repeat_interleave"),
            ("InplaceRemainderTensorScalar", "remainder"),
            ("InplacePowTensorScalar", "pow"),
            ("PowTensorTensor", "pow_tensor_tensor"),
            ("InplaceScatterValue", "scatter"),
            ("ScatterNdUpdate", "scatter_nd_update"),
            ("EqTensor", "eq_tensor"),
            ("ArgMax", "argmax"),
        ] {
            assert_eq!(stem(name, &all), header, "{name}");
        }
    }

    #[test]
    fn versions_share_a_header_and_types_are_those_of_c() {
        let table = "/// `a + b`.\nfn aclnnAdd(self_: In, other: In, alpha: Scalar, out: Out) = add;\n/// `a + 1`.\n\
                     fn aclnnAdds(\n self_: In, keepDims: Flag, out: Out\n) = adds;";
        let headers = headers(table).unwrap();
        assert_eq!(headers.len(), 1);
        let text = &headers["aclnn_add.h"];
        for part in [
            "const aclTensor *self,\n    const aclTensor *other,\n    const aclScalar *alpha,",
            "aclnnAddsGetWorkspaceSize(\n    const aclTensor *self,\n    bool keepDims,\n    aclTensor *out,",
            "aclnnStatus aclnnAdds(\n    void *workspace,",
        ] {
            assert!(text.contains(part), "{text}");
        }
        let unknown = super::headers("/// x\nfn aclnnNew(self_: Inn) = new;").unwrap_err();
        assert!(unknown.ends_with("aclnnNew: self: no C type for `Inn`"), "{unknown}");
    }
}
