//! README.md and its Chinese translation show the same programs and have the same headings.

use std::fs;
use std::path::Path;

/// What a translation leaves as it is: the code blocks, and the level of each heading.
#[derive(Debug, Default)]
struct Outline {
    blocks: Vec<String>,
    headings: Vec<usize>,
}

fn outline(text: &str) -> Outline {
    let mut outline = Outline::default();
    let mut block: Option<String> = None;
    for line in text.lines() {
        let fence = line.starts_with("```");
        block = match block {
            Some(inner) if fence => {
                outline.blocks.push(inner);
                None
            }
            Some(inner) => Some(inner + line + "\n"),
            None if fence => Some(format!("{line}\n")),
            None => {
                let level = line.bytes().take_while(|byte| *byte == b'#').count();
                outline.headings.extend((level > 0).then_some(level));
                None
            }
        };
    }
    outline
}

#[test]
fn the_chinese_readme_shows_what_the_english_one_shows() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let english = fs::read_to_string(root.join("README.md")).unwrap();
    let chinese = fs::read_to_string(root.join("README.zh-CN.md")).unwrap();
    for (name, text, other) in
        [("README.md", &english, "(README.zh-CN.md)"), ("README.zh-CN.md", &chinese, "(README.md)")]
    {
        let first = text.lines().next().unwrap_or_default();
        assert!(first.contains(other), "{name}: its first line does not link to {other}: {first}");
    }
    let (english, chinese) = (outline(&english), outline(&chinese));
    assert_eq!(
        english.headings, chinese.headings,
        "README.md (left) and README.zh-CN.md (right) have other headings, by their levels"
    );
    assert_eq!(
        english.blocks.len(),
        chinese.blocks.len(),
        "README.md (left) and README.zh-CN.md (right) have another number of code blocks"
    );
    for (number, (left, right)) in english.blocks.iter().zip(&chinese.blocks).enumerate() {
        let mut lines = left.lines().zip(right.lines());
        let differs = lines.find(|(left, right)| left != right);
        assert!(
            left == right,
            "code block {} of README.zh-CN.md is not that of README.md: {}",
            number + 1,
            match differs {
                Some((left, right)) => format!("`{right}` in place of `{left}`"),
                None => "one of the two has more lines".to_owned(),
            }
        );
    }
}
