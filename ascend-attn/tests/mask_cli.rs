//! `ascend-attn mask`: the text form by definitions, explanations, pictures, cases.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The folder of the workspace.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ascend-attn")).current_dir(ROOT).arg("mask").args(arguments).output().unwrap()
}

/// The lines of a command that succeeds.
#[track_caller]
fn lines(arguments: &[&str]) -> Vec<String> {
    let output = run(arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(str::to_owned).collect()
}

#[track_caller]
fn refused(arguments: &[&str], why: &str) {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    assert!(output.stdout.is_empty());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains(why), "{arguments:?}: {error}");
}

/// Compares the text form with a definition.
#[track_caller]
fn shows(arguments: &[&str], (sq, skv): (i64, i64), visible: impl Fn(i64, i64) -> bool) {
    let (rows, keys) = (sq.to_string(), skv.to_string());
    let mut all = arguments.to_vec();
    all.extend(["--sq", &rows, "--skv", &keys, "--text"]);
    let want: Vec<String> =
        (0..sq).map(|i| (0..skv).map(|j| if visible(i, j) { '#' } else { '.' }).collect()).collect();
    assert_eq!(lines(&all), want, "{arguments:?}");
}

fn scratch(name: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(name);
    (folder, file)
}

#[test]
fn the_text_form_is_the_definition() {
    for size in [(5, 9), (9, 5), (7, 7), (1, 4), (4, 1), (0, 3)] {
        let shift = size.1 - size.0;
        shows(&["mode0"], size, |_, _| true);
        shows(&["mode0", "--pre", "2", "--next", "1"], size, |i, j| i - 2 <= j && j <= i + 1);
        shows(&["mode0", "--pre", "-1", "--next", "3"], size, |i, j| i < j && j <= i + 3);
        shows(&["mode1"], size, |_, _| true);
        for kind in ["mode2", "mla"] {
            shows(&[kind], size, |i, j| j <= i);
        }
        for kind in ["mode3", "causal", "chunked-prefill", "mode7"] {
            shows(&[kind], size, |i, j| j <= i + shift);
        }
        shows(&["mode8"], size, |i, j| j <= i);
        shows(&["mode4", "--pre", "2", "--next", "1"], size, |i, j| (i + shift - 2..=i + shift + 1).contains(&j));
        shows(&["mode4", "--pre", "4", "--next", "-2"], size, |i, j| (i + shift - 4..=i + shift - 2).contains(&j));
        shows(&["sliding-window", "--window", "3"], size, |i, j| (i + shift - 2..=i + shift).contains(&j));
        for kind in ["mode5", "mode6", "prefix"] {
            shows(&[kind, "--prefix", "4"], size, |i, j| j < 4 || j <= i + shift);
        }
        shows(&["local", "--chunk", "3"], size, |i, j| {
            let p = i + shift;
            j <= p && j / 3 == p / 3
        });
    }
}

#[test]
fn triangle_mix_is_drawn_for_prompts_and_chunks() {
    let (sink, window, last) = (2, 4, 4);
    for (rows, keys, prompt) in [(16, 16, 16), (6, 16, 16), (6, 12, 16), (6, 12, 14)] {
        let prompt_len = prompt.to_string();
        let sizes = ["--sink", "2", "--window", "4", "--last", "4", "--prompt-len", &prompt_len];
        let part = |kind: &str, visible: &dyn Fn(bool, bool) -> bool| {
            let mut arguments = vec![kind];
            arguments.extend(sizes);
            shows(&arguments, (rows, keys), |i, j| {
                let q = i + keys - rows;
                let streaming = j < sink || q - j < window;
                j <= q && visible(streaming, q >= prompt - last)
            });
        };
        part("dense", &|_, _| true);
        part("streaming", &|streaming, _| streaming);
        part("last", &|streaming, last| !streaming && last);
        part("middle", &|streaming, last| !streaming && !last);
        part("triangle", &|streaming, last| streaming || last);
    }
}

#[test]
fn packed_sequences_see_their_own_keys() {
    let mode7 = ["mode7", "--q-ends", "3,5", "--kv-ends", "3,9", "--pre", "6", "--next", "-2"];
    let want = ["#........", "##.......", "###......", "...###...", "...####.."];
    assert_eq!(lines(&mode7), want);
    let mode8 = ["mode8", "--q-ends", "3,8", "--kv-ends", "4,9", "--pre", "4", "--next", "1"];
    let want = ["###......", "####.....", "####.....", "....#....", "....##...", "....###..", "....####.", "....#####"];
    assert_eq!(lines(&mode8), want);
    let mode6 = ["mode6", "--q-ends", "2,2,4", "--kv-ends", "3,3,6", "--prefix", "2,0,0"];
    assert_eq!(lines(&mode6), ["##....", "###...", "...##.", "...###"]);
}

#[test]
fn trees_and_tensors_are_read_from_files() {
    let (_folder, file) = scratch("tree");
    fs::write(&file, "[-1, 0, 0,\n1]").unwrap();
    let tree = ["tree", "--tree", file.to_str().unwrap(), "--skv", "6"];
    assert_eq!(lines(&tree), ["###...", "####..", "###.#.", "####.#"]);
    let mode9 = [&["mode9"], &tree[1..]].concat();
    assert_eq!(lines(&mode9), lines(&tree));
    refused(&["mode9"], "mode9: --tree FILE");
    refused(&["tree", "--tree", file.to_str().unwrap(), "--skv", "3"], "--skv counts them too");
    fs::write(&file, "-1 5").unwrap();
    refused(&tree, "token 1 has parent 5");
    fs::write(&file, "-1 x").unwrap();
    refused(&tree, "\"x\": a token's parent");
    refused(&["tree"], "--tree FILE");

    fs::write(&file, "#.#\n.##\n").unwrap();
    let tensor = ["mode1", "--tensor", file.to_str().unwrap()];
    assert_eq!(lines(&tensor), ["#.#", ".##"]);
    let band = ["mode0", "--pre", "1", "--next", "0", "--tensor", file.to_str().unwrap()];
    assert_eq!(lines(&band), ["#..", ".#."]);
    refused(&["mode3", "--tensor", file.to_str().unwrap()], "--tensor belongs to mode0, mode1");
    refused(&["mode1", "--sq", "9", "--tensor", file.to_str().unwrap()], "--sq 9: the mask of --tensor has 2");
    fs::write(&file, "#.#\n.#\n").unwrap();
    refused(&tensor, "line 2: 3 characters");
}

#[test]
fn explanations_say_the_rule_and_what_the_row_sees() {
    let explained = |arguments: &[&str]| lines(arguments).join("\n");
    let band = ["mode4", "--sq", "4", "--skv", "6", "--pre", "1", "--next", "0", "--explain", "1", "5"];
    let text = explained(&band);
    assert!(text.starts_with("row 1, key 5: hidden\n"), "{text}");
    assert!(text.contains("j <= i + Skv - Sq + nextTokens") && text.contains("preTokens 1, nextTokens 0"), "{text}");
    assert!(text.ends_with("row 1 sees the keys 2 to 3"), "{text}");
    let sizes = ["--sq", "20", "--sink", "2", "--window", "4", "--last", "4", "--explain"];
    let triangle = |i: &'static str, j: &'static str| {
        let mut arguments = vec!["triangle"];
        arguments.extend(sizes);
        arguments.extend([i, j]);
        explained(&arguments)
    };
    assert!(triangle("10", "1").contains("it is a sink: 1 < 2"));
    assert!(triangle("10", "7").contains("it is in the window: 10 - 7 <= 3"));
    assert!(triangle("10", "5").contains("hidden") && triangle("10", "5").contains("it is in the middle"));
    assert!(triangle("17", "5").contains("visible") && triangle("17", "5").contains("one of the last 4 rows"));
    assert!(triangle("10", "11").contains("behind the row's own place: 11 > 10"));
    assert!(explained(&["mode3", "--sq", "3", "--skv", "1", "--explain", "0", "0"]).contains("sees no key"));
}

#[test]
fn pictures_are_written_in_both_formats() {
    let (_folder, png) = scratch("mask.png");
    let (_other, svg) = scratch("mask.svg");
    for arguments in [
        &["triangle", "--sq", "24", "--sink", "2", "--window", "4", "--last", "5"][..],
        &["mode3", "--sq", "3000", "--skv", "5000"],
        &["local", "--sq", "0"],
        &["mode2", "--sq", "1000000000", "--skv", "7"],
    ] {
        let mut all = arguments.to_vec();
        all.extend(["--png", png.to_str().unwrap(), "--svg", svg.to_str().unwrap()]);
        assert!(lines(&all).is_empty());
        let bytes = fs::read(&png).unwrap();
        assert!(bytes.starts_with(b"\x89PNG\r\n\x1a\n"), "{arguments:?}");
        let text = fs::read_to_string(&svg).unwrap();
        assert!(text.starts_with("<svg ") && text.ends_with("</svg>\n"), "{arguments:?}");
        assert!(text.contains(" visible (") && text.len() < 4 << 20, "{arguments:?}: {}", text.len());
    }
    refused(&["mode2", "--sq", "1000000", "--skv", "1000000"], "too many for text");
    refused(&["mode2", "--png", "/nowhere/mask.png"], "/nowhere/mask.png");
}

#[test]
fn pictures_of_a_million_million_rows_are_drawn_in_tiles() {
    let (_folder, file) = scratch("mask.svg");
    let file = file.to_str().unwrap();
    let (long, half) = ("1000000000000", "500000000000");
    for mask in [
        &["local", "--sq", long, "--skv", long][..],
        &["local", "--sq", long, "--skv", "16"],
        &["mode3", "--q-ends", "500000000000,1000000000000", "--kv-ends", "500000000000,1000000000000"],
        &["mode2", "--sq", half, "--skv", long],
    ] {
        let begun = std::time::Instant::now();
        lines(&[mask, &["--svg", file]].concat());
        let text = fs::read_to_string(file).unwrap();
        assert!(text.contains(" of ") && text.contains("tiles of"), "{mask:?}");
        let took = begun.elapsed();
        assert!(took.as_secs() < 60, "{mask:?}: {took:?}");
    }
    let (_folder, tensor) = scratch("mask.txt");
    fs::write(&tensor, "#\n".repeat((1 << 20) + 1)).unwrap();
    let tensor = tensor.to_str().unwrap();
    let rows = ((1 << 20) + 1).to_string();
    let mask = ["mode1", "--sq", &rows, "--skv", "1", "--tensor", tensor, "--svg", file];
    refused(&mask, "at most 1048576");
}

#[test]
fn a_text_form_without_keys_ends_too() {
    for (sq, skv) in [("1000000000000", "0"), ("1000000000000", "1"), ("1", "1000000000000")] {
        for kind in ["mode3", "mode5", "mode6", "local"] {
            refused(&[kind, "--sq", sq, "--skv", skv], "too many for text");
        }
    }
    assert_eq!(lines(&["mode3", "--sq", "3", "--skv", "0"]), ["", "", ""]);
}

/// A mask that is counted row by row is looked at once for each of its rows, not once for each tile.
#[test]
fn pictures_of_wide_tensors_and_deep_trees_are_drawn_soon() {
    let (_folder, file) = scratch("mask.svg");
    let file = file.to_str().unwrap();
    let (_folder, tensor) = scratch("mask.txt");
    fs::write(&tensor, format!("{}\n", "#.".repeat(1200)).repeat(2400)).unwrap();
    let (_folder, tree) = scratch("tree.txt");
    let parents = (0..4000).map(|token| (token - 2).max(-1).to_string());
    fs::write(&tree, parents.collect::<Vec<_>>().join(" ")).unwrap();
    let (tensor, tree) = (tensor.to_str().unwrap(), tree.to_str().unwrap());
    for (mask, counts) in [
        (&["mode1", "--tensor", tensor][..], "2880000 of 5760000 visible (50.0%)"),
        (&["tree", "--tree", tree], "4002000 of 16000000 visible (25.0%)"),
        (&["tree", "--tree", tree, "--skv", "5000"], "8002000 of 20000000"),
    ] {
        let begun = std::time::Instant::now();
        lines(&[mask, &["--svg", file]].concat());
        assert!(fs::read_to_string(file).unwrap().contains(counts), "{mask:?}");
        assert!(begun.elapsed().as_secs() < 60, "{mask:?}");
    }
}

#[test]
fn a_picture_is_as_wide_as_its_cells_and_not_as_its_title() {
    let (_folder, file) = scratch("mask.png");
    let file = file.to_str().unwrap();
    let ends: Vec<String> = (1..=9000).map(|end| end.to_string()).collect();
    let ends = ends.join(",");
    lines(&["mode3", "--q-ends", &ends, "--kv-ends", &ends, "--png", file]);
    let bytes = fs::read(file).unwrap();
    let width = u32::from_be_bytes(bytes[16..20].try_into().unwrap());
    assert!(width < 2000, "{width}");
    // As many sequences without a row, in a mode that looks for one with rows.
    let none = vec!["0"; 9000].join(",");
    for kind in ["mode7", "mode8"] {
        assert!(lines(&[kind, "--q-ends", &none, "--kv-ends", &none]).is_empty());
    }
}

#[test]
fn packed_tiles_stand_as_their_rows_say() {
    let (_folder, file) = scratch("mask.svg");
    let file = file.to_str().unwrap();
    // Sequences of 4 rows and 4 keys, and of 4 and 8: of the tiles of 4 x 4 the first and the second sequence's are
    // seen.
    let ends = ["--q-ends", "4,8", "--kv-ends", "4,12", "--block", "4", "--svg", file];
    for (mode, counts) in
        [(&["mode0"][..], "3 all visible, 0 mixed, 3 hidden"), (&["mode3"], "1 all visible, 2 mixed, 3 hidden")]
    {
        lines(&[mode, &ends].concat());
        let text = fs::read_to_string(file).unwrap();
        assert!(text.contains(counts), "{mode:?}: {text}");
    }
}

#[test]
fn the_masks_of_cases_are_drawn() {
    let vectors = Path::new(ROOT).join("tests/vectors");
    let mut drawn = 0;
    for folder in ["numeric", "real"] {
        for entry in fs::read_dir(vectors.join(folder)).unwrap() {
            let file = entry.unwrap().path();
            let output = run(&["--case", file.to_str().unwrap(), "--text"]);
            if output.status.success() {
                let text = String::from_utf8(output.stdout).unwrap();
                assert!(text.lines().all(|line| line.chars().all(|c| "#.".contains(c))));
                drawn += 1;
            } else {
                // A case that the operator refuses has no mask.
                assert_eq!(output.status.code(), Some(2), "{}", file.display());
                assert!(!output.stderr.is_empty());
            }
        }
    }
    assert!(drawn > 0);
    refused(&["--case", "/nowhere.safetensors"], "/nowhere.safetensors");
    // A case names what it is for.
    let other = vectors.join("targets/088_950_differs_bsnd_64_128_causal.safetensors");
    let output = run(&["--case", other.to_str().unwrap(), "--text"]);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{complaint}");
    // Which of several sequences is drawn is said where it was not asked for.
    let batch = vectors.join("real/minilm_layer0.safetensors");
    let said = |arguments: &[&str]| {
        let output = run(&[&["--case", batch.to_str().unwrap()], arguments].concat());
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    assert_eq!(said(&[]), "note: sequence 0 of 4; --sequence N shows another\n");
    assert_eq!(said(&["--sequence", "0"]), "");
    // Either a kind or a case.
    refused(&["causal", "--case", other.to_str().unwrap()], "mask [OPTIONS] --case <FILE>");
}

#[test]
fn flags_that_do_not_belong_to_a_mask_are_refused_with_those_that_do() {
    for (arguments, flag) in [
        (&["causal", "--window", "2"][..], "--window"),
        (&["mode3", "--pre", "2"], "--pre"),
        (&["mode2", "--next", "2"], "--next"),
        (&["mode1", "--pre", "2"], "--pre"),
        (&["mode4", "--prefix", "2"], "--prefix"),
        (&["mode5", "--window", "2"], "--window"),
        (&["sliding-window", "--chunk", "2"], "--chunk"),
        (&["sliding-window", "--q-ends", "2", "--kv-ends", "2"], "--q-ends"),
        (&["local", "--sink", "2"], "--sink"),
        (&["mla", "--last", "2"], "--last"),
        (&["chunked-prefill", "--prompt-len", "99"], "--prompt-len"),
        (&["prefix", "--preset", "guide"], "--preset"),
        (&["tree", "--tensor", "x"], "--tensor"),
        (&["triangle", "--tree", "x"], "--tree"),
    ] {
        let belongs = format!("{flag} does not belong to {}, which takes --sq, ", arguments[0]);
        refused(arguments, &belongs);
    }
    refused(
        &["causal", "--window", "2"],
        "--window belongs to sliding-window, triangle, streaming, last, middle, dense",
    );
    // A case has its own lengths, modes and windows.
    let case = Path::new(ROOT).join("tests/vectors/numeric/059_head_dim_16.safetensors");
    let case = case.to_str().unwrap();
    for flag in ["--sq", "--window", "--chunk", "--prefix"] {
        refused(&["--case", case, flag, "2"], &format!("{flag} does not go with --case"));
    }
    refused(&["mode3", "--block", "4"], "--block is about pictures");
    refused(&["mode3", "--block", "0", "--png", "x.png"], "--block");
    refused(&["mode5", "--prefix", "2,3"], "2 numbers for 1 sequences");
    let longest = u64::MAX.to_string();
    refused(&["triangle", "--prompt-len", &longest], "--prompt-len 18446744073709551615: at most 1099511627776");
    refused(
        &["mode3", "--q-ends", "9223372036854775807", "--kv-ends", "1"],
        "--q-ends ends at 9223372036854775807: at most 1099511627776",
    );
    refused(&["mode5", "--prefix", "-1"], "0 or more");
}

#[test]
fn a_window_counts_the_rows_own_key_for_every_mask_and_the_help_says_so() {
    let row = |kind: &str| {
        let arguments = [kind, "--sq", "9", "--window", "3", "--explain", "8", "8"];
        lines(&arguments).last().unwrap().clone()
    };
    assert_eq!(row("sliding-window"), "row 8 sees the keys 6 to 8");
    let sinks = ["streaming", "--sq", "9", "--sink", "1", "--window", "3", "--explain", "8", "8"];
    assert_eq!(lines(&sinks).last().unwrap(), "row 8 sees the keys 0 to 0 and 6 to 8");
    for kind in ["sliding-window", "streaming", "triangle"] {
        refused(&[kind, "--window", "0"], "1 or more");
    }
    // A preset's sizes are the published ones: keys before the row's own.
    let guide = ["streaming", "--sq", "99", "--preset", "guide", "--explain", "98", "98"];
    assert_eq!(lines(&guide).last().unwrap(), "row 98 sees the keys 0 to 3 and 66 to 98");
    for flag in ["-h", "--help"] {
        let help = lines(&[flag]).join("\n");
        assert!(help.contains("--window <N>") && help.contains("its own among them"), "{help}");
    }
}

#[test]
fn a_row_or_a_key_that_is_not_there_cannot_be_explained() {
    for (i, j) in [("4", "0"), ("0", "6"), ("18446744073709551615", "0")] {
        refused(
            &["mode3", "--sq", "4", "--skv", "6", "--explain", i, j],
            &format!("--explain {i} {j}: there are 4 rows and 6 keys, counted from 0"),
        );
    }
}

#[test]
fn wrong_command_lines_are_refused_with_the_fix() {
    refused(&["sliding-window", "--window", "0"], "1 or more");
    refused(&["local", "--chunk", "0"], "1 or more");
    refused(&["mla", "--sq", "513"], "512");
    refused(&["triangle", "--sq", "9", "--skv", "8"], "every row of a prompt");
    refused(&["triangle", "--sq", "9", "--prompt-len", "8"], "--prompt-len 8");
    refused(&["mode7", "--q-ends", "3,2", "--kv-ends", "3,9"], "--q-ends");
    refused(&["mode7", "--q-ends", "3", "--kv-ends", "3,9"], "1 sequences, --kv-ends 2");
    refused(&["mode9"], "mode9");
    refused(&[], "KIND");
    refused(&["mode3", "--sq", "18446744073709551615"], "at most");
}

#[test]
fn a_row_of_many_runs_is_explained_and_drawn() {
    let (_folder, file) = scratch("mask.txt");
    let line = "#.".repeat(1 << 17);
    fs::write(&file, format!("{line}\n")).unwrap();
    let file = file.to_str().unwrap();
    let said = lines(&["mode0", "--tensor", file, "--explain", "0", "2"]);
    assert_eq!(said.last().unwrap(), "row 0 sees 131072 runs of keys");
    let (_folder, picture) = scratch("mask.png");
    lines(&["mode0", "--tensor", file, "--png", picture.to_str().unwrap()]);
    assert!(fs::read(picture).unwrap().starts_with(b"\x89PNG"));
}
