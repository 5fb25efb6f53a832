// SPDX-License-Identifier: Apache-2.0
//! The program in README.md is the example `line`, and prints the output in README.md.
use std::process::Command;

fn block<'a>(text: &'a str, language: &str) -> &'a str {
    let begin = format!("```{language}\n");
    let from = text.find(&begin).expect("a block of this language") + begin.len();
    &text[from..from + text[from..].find("```").expect("the end of the block")]
}

#[test]
fn program_prints_what_the_readme_says() {
    let readme = include_str!("../README.md");
    assert_eq!(block(readme, "rust"), include_str!("../examples/line.rs"));
    // Cargo builds examples before it runs tests, in the folder next to that of the tests.
    let own = std::env::current_exe().unwrap();
    let program = own.parent().unwrap().with_file_name("examples").join("line");
    let output = Command::new(program).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), block(readme, "text"));
}
