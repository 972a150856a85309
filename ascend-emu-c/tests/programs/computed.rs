//! Programs print the numbers of attention, and what they lean on beside it works.

use crate::{command, compile, compile_with, lay_out, run, succeed};

/// Element of the tensor with a seed, as the programs make it; half precision holds it exactly.
pub(crate) fn element(seed: usize, index: usize) -> f64 {
    ((index * 37 + seed * 101) % 65) as f64 / 32.0 - 1.0
}

pub(crate) const HEADS: usize = 2;
pub(crate) const QUERIES: usize = 3;
pub(crate) const KEYS: usize = 5;
pub(crate) const DIM: usize = 16;
const SCALE: f64 = 0.25;

/// A release without the lint `version.deprecated`, which tells programs that call the operator's first version.
pub(crate) const BEFORE_DEPRECATION: (&str, &str) = ("ASCEND_EMU_CANN", "8.5");

/// Attention of one row in double precision, over the first `visible` keys: the row, and its log-sum-exp.
fn row(
    visible: usize,
    q: impl Fn(usize) -> f64,
    k: impl Fn(usize, usize) -> f64,
    v: impl Fn(usize, usize) -> f64,
) -> (Vec<f64>, f64) {
    let score = |j: usize| (0..DIM).map(|d| q(d) * k(j, d)).sum::<f64>() * SCALE;
    let weights: Vec<f64> = (0..visible).map(|j| score(j).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let out = (0..DIM).map(|d| (0..visible).map(|j| weights[j] * v(j, d)).sum::<f64>() / sum).collect();
    (out, sum.ln())
}

#[test]
fn a_c_program_computes_attention() {
    let libraries = lay_out();
    let program = compile("two_phase.c", &["-std=c99"], libraries.path());
    let printed = run(&program, libraries.path());
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for head in 0..HEADS {
        for i in 0..QUERIES {
            // Both heads share the one key head.
            let q = |d| element(1, (head * QUERIES + i) * DIM + d);
            let (values, sum) = row(KEYS, q, |j, d| element(2, j * DIM + d), |j, d| element(3, j * DIM + d));
            out.extend(values);
            lse.push(sum);
        }
    }
    printed.check("out", &out, 1e-3);
    printed.check("lse", &lse, 1e-5);
    assert!(printed.lines.contains(&"refused 161001 with a message".to_owned()));
}

#[test]
fn a_cpp_program_with_the_usual_habits_computes_causal_attention() {
    let libraries = lay_out();
    let program = compile("habits.cpp", &["-std=c++11"], libraries.path());
    let printed = run(&program, libraries.path());
    let mut out = Vec::new();
    for i in 0..QUERIES {
        for head in 0..HEADS {
            let at = |row: usize, d: usize| (row * HEADS + head) * DIM + d;
            // The last query sees every key.
            let (values, _) = row(
                i + KEYS - QUERIES + 1,
                |d| element(4, at(i, d)),
                |j, d| element(5, at(j, d)),
                |j, d| element(6, at(j, d)),
            );
            out.extend(values);
        }
    }
    printed.check("out", &out, 1e-3);
    assert!(printed.lines.contains(&"shape 1 5 2 16".to_owned()));
}

#[test]
fn the_environment_chooses() {
    let libraries = lay_out();
    let habits = compile("habits.cpp", &["-std=c++11"], libraries.path());
    let two_phase = compile("two_phase.c", &["-std=c99"], libraries.path());
    for (program, name, value, told) in [
        // Reading past an allocation.
        (&habits, "ASCEND_EMU_CHECK", "strict", "out of bounds"),
        (&habits, "ASCEND_EMU_CHECK", "lax", "compat, strict"),
        (&habits, "ASCEND_EMU_CHECK", "strict,-races", "pageable_copy, unwritten_read"),
        (&two_phase, "ASCEND_EMU_FAULT", "malloc:2=207001", "207001"),
        (&two_phase, "ASCEND_EMU_FAULT", "launch:1=507015", "507015"),
        (&two_phase, "ASCEND_EMU_FAULT", "sync:1=507014", "507014"),
        (&two_phase, "ASCEND_EMU_MEMORY", "1048576", "out of memory"),
        (&two_phase, "ASCEND_EMU_SOC", "Ascend310P3", "Atlas inference"),
        (&two_phase, "ASCEND_EMU_DEVICES", "none", "1 to 64"),
        (&two_phase, "ASCEND_EMU_TRACE", "/", "a file to append to"),
    ] {
        let output = command(program, libraries.path()).env(name, value).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{name}={value}: {text}");
        assert!(text.contains(told), "{name}={value}: {text}");
    }
    let output = command(&two_phase, libraries.path())
        .envs([BEFORE_DEPRECATION])
        .env("ASCEND_EMU_THREADS", "1")
        .env("ASCEND_EMU_CHECK", "strict")
        .output()
        .unwrap();
    assert!(output.status.success());
    assert!(output.stderr.is_empty(), "a right program is told nothing");
}

#[test]
fn a_cpp_program_fills_tensors_with_the_half_of_op() {
    let libraries = lay_out();
    let newer = ["acl_rt", "nnopbase", "opapi_transformer", "opapi_math"];
    let program = compile_with("host_types.cpp", &["-std=c++11"], &newer, libraries.path());
    run(&program, libraries.path());
}

#[test]
fn a_c_program_copies_with_the_functions_of_libc_sec() {
    let libraries = lay_out();
    let names = ["c_sec", "ascendcl"];
    let program = compile_with("secure.c", &["-std=c99"], &names, libraries.path());
    run(&program, libraries.path());
}

#[test]
fn a_c_program_computes_attention_of_training_and_merges_it() {
    const PACKED_ROWS: usize = 5;
    let libraries = lay_out();
    let names = ["ascendcl", "nnopbase", "opapi", "m"];
    let program = compile_with("training.c", &["-std=c99"], &names, libraries.path());
    let printed = run(&program, libraries.path());
    let at = |row: usize, head: usize, d: usize| (row * HEADS + head) * DIM + d;
    let mut out = Vec::new();
    let mut lse = vec![0.0; HEADS * QUERIES * 8];
    for i in 0..QUERIES {
        for head in 0..HEADS {
            // Both parts of the keys at once.
            let of = |seed: usize| {
                move |j: usize, d: usize| match j.checked_sub(KEYS) {
                    None => element(seed, at(j, head, d)),
                    Some(j) => element(seed + 2, at(j, head, d)),
                }
            };
            let (values, sum) = row(2 * KEYS, |d| element(1, at(i, head, d)), of(2), of(3));
            out.extend(values);
            lse[(head * QUERIES + i) * 8..][..8].fill(sum);
        }
    }
    // Sequences of 2 and 3 rows over 2 and 5 keys; the last one hides its last key, too.
    for i in 0..PACKED_ROWS {
        let (first, visible) = match i {
            0 | 1 => (0, i + 1),
            _ => (2, i),
        };
        for head in 0..HEADS {
            let of = |seed: usize| move |j: usize, d: usize| element(seed, at(first + j, head, d));
            let (values, _) = row(visible, |d| element(6, at(i, head, d)), of(7), of(8));
            out.extend(values);
        }
    }
    printed.check("out", &out, 1e-5);
    printed.check("lse", &lse, 1e-5);
    let refused = "refused 161001 with a message".to_owned();
    assert!(printed.lines.contains(&refused));
}

#[test]
fn a_cpp_program_computes_attention_of_inference_cards() {
    let libraries = lay_out();
    let program = compile("prompt_and_incre.cpp", &["-std=c++11"], libraries.path());
    let printed = run(&program, libraries.path());
    let mut out = Vec::new();
    // The newest and the oldest version of each operator.
    for rows in [QUERIES, QUERIES, 1, 1] {
        for head in 0..HEADS {
            for i in 0..rows {
                let q = |d| element(1, (head * rows + i) * DIM + d);
                let k = |j, d| element(2, j * DIM + d);
                let (values, _) = row(KEYS, q, k, |j, d| element(3, j * DIM + d));
                out.extend(values);
            }
        }
    }
    printed.check("out", &out, 1e-3);
}

#[test]
fn ranks_in_threads_and_in_processes_get_what_collectives_of_any_size_give() {
    let libraries = lay_out();
    let flags = ["-std=c++17", "-pthread"];
    let program = compile_with("collective_sizes.cpp", &flags, &["hccl", "ascendcl"], libraries.path());
    for (kind, ranks) in [("threads", "4"), ("processes", "3"), ("processes", "1")] {
        let mut command = command(&program, libraries.path());
        let sockets = tempfile::tempdir().unwrap();
        command.args([kind, ranks]).env("ASCEND_EMU_DEVICES", "4").env("TMPDIR", sockets.path());
        let text = String::from_utf8(succeed(&mut command).stdout).unwrap();
        let operators = ["all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast"];
        let expected: String = operators.iter().map(|operator| format!("{operator} {ranks} ranks\n")).collect();
        assert_eq!(text, expected + "done\n", "{kind}");
    }
}

#[test]
fn two_ranks_of_one_program_gather_and_add() {
    let libraries = lay_out();
    for names in [&["ascendcl", "hccl"][..], &["ascendcl", "hcomm"]] {
        let program = compile_with("collectives.c", &["-std=c99"], names, libraries.path());
        let printed = run(&program, libraries.path()).lines;
        assert_eq!(printed.first().map(String::as_str), Some("config 300 4294967295"));
        for rank in 0..2 {
            let of = |what: &str| -> Vec<f64> {
                let start = format!("{what} {rank} ");
                printed.iter().filter_map(|line| line.strip_prefix(&start)?.parse().ok()).collect()
            };
            assert_eq!(of("gathered"), [0.0, 1.0, 2.0, 10.0, 11.0, 12.0]);
            assert_eq!(of("sum"), [10.0, 12.0, 14.0]);
        }
        assert!(printed.iter().any(|line| line == "1 wrong argument"), "{printed:?}");
    }
}
