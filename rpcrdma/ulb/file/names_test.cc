#include "rpcrdma/ulb/file/names.h"

#include <gtest/gtest.h>

namespace stagecoach::rpcrdma::file {
namespace {

TEST(Names, OrdinaryNamesAreValid) {
  for (std::string_view name :
       {"a", "a b", "...", "..a", "a..", ".profile", "GPL-3", "\xc3\xa4", "\xff\xfe", "-r", "*", "\\"}) {
    EXPECT_TRUE(IsValidName(name)) << name;
  }
  EXPECT_TRUE(IsValidName(std::string(255, 'x')));
}

TEST(Names, HostileNamesAreNot) {
  for (std::string_view name : {"", ".", "..", "/", "a/b", "/etc/passwd", "../x", "a/"})
    EXPECT_FALSE(IsValidName(name)) << name;
  EXPECT_FALSE(IsValidName(std::string_view("a\0b", 3)));
  EXPECT_FALSE(IsValidName(std::string_view("\0", 1)));
  EXPECT_FALSE(IsValidName(std::string(256, 'x')));
}

TEST(Names, HiddenNamesAreTheServersOwn) {
  EXPECT_TRUE(IsHiddenName(".stagecoach.0123456789abcdef.part"));
  EXPECT_FALSE(IsValidName(".stagecoach.0123456789abcdef.part"));
  for (std::string_view name :
       {".stagecoach.part", ".stagecoach.0123456789ABCDEF.part", ".stagecoach.0123456789abcde.part",
        "x.stagecoach.0123456789abcdef.part", ".stagecoach.0123456789abcdef.part2"}) {
    EXPECT_FALSE(IsHiddenName(name)) << name;
  }
}

TEST(Names, PathsAreBoundedInDepthAndBytes) {
  EXPECT_TRUE(IsValidPath({}));
  EXPECT_TRUE(IsValidPath(Path(64, "d")));
  EXPECT_FALSE(IsValidPath(Path(65, "d")));
  EXPECT_TRUE(IsValidPath(Path(15, std::string(255, 'd'))));
  EXPECT_FALSE(IsValidPath(Path(16, std::string(255, 'd'))));
  EXPECT_FALSE(IsValidPath({"a", "..", "b"}));
}

TEST(Names, SplitAndJoinAreTextOnly) {
  EXPECT_EQ(SplitPath("/a//b/c/"), (Path{"a", "b", "c"}));
  EXPECT_EQ(SplitPath(""), Path{});
  EXPECT_EQ(SplitPath("///"), Path{});
  EXPECT_EQ(SplitPath("../x"), (Path{"..", "x"}));
  EXPECT_EQ(Join({}), ".");
  EXPECT_EQ(Join({"a", "b"}), "a/b");
}

TEST(Names, PrintableKeepsTextAndEscapesWhatATerminalObeys) {
  EXPECT_EQ(Printable("plain name.txt"), "plain name.txt");
  EXPECT_EQ(Printable("\xc3\xa4\xe2\x82\xac\xf0\x9f\x90\x8e"), "\xc3\xa4\xe2\x82\xac\xf0\x9f\x90\x8e");
  EXPECT_EQ(Printable("a\nb\x1b[31m\x7f"), "a\\x0ab\\x1b[31m\\x7f");
  EXPECT_EQ(Printable("back\\x41"), "back\\\\x41");
  EXPECT_EQ(Printable(std::string_view("\0", 1)), "\\x00");
}

TEST(Names, PrintableEscapesMalformedUtf8AndDeceptiveCharacters) {
  EXPECT_EQ(Printable("\xff"), "\\xff");
  EXPECT_EQ(Printable("\xc0\xaf"), "\\xc0\\xaf");           // overlong '/'
  EXPECT_EQ(Printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // surrogate
  EXPECT_EQ(Printable("\xe2\x82"), "\\xe2\\x82");           // cut short
  EXPECT_EQ(Printable("\xc2\x9b"
                      "31m"),
            "\\xc2\\x9b"
            "31m");  // C1 control: CSI
  EXPECT_EQ(Printable("\xe2\x80\xae"
                      "txt.exe"),
            "\\xe2\\x80\\xae"
            "txt.exe");  // right-to-left override
}

TEST(Names, PrintableEscapesEveryCharacterThatIsNotSeen) {
  EXPECT_EQ(Printable("\xd8\x9c"), "\\xd8\\x9c");                    // U+061C, Arabic letter mark
  EXPECT_EQ(Printable("\xef\xbb\xbf"), "\\xef\\xbb\\xbf");           // U+FEFF, zero width no-break space
  EXPECT_EQ(Printable("\xf3\xa0\x80\x80"), "\\xf3\\xa0\\x80\\x80");  // U+E0000, the first tag
  EXPECT_EQ(Printable("\xf3\xa0\x81\xbf"), "\\xf3\\xa0\\x81\\xbf");  // U+E007F, the last tag
  // Their neighbours are text: U+061B, U+FEFC, U+E0100.
  for (const char* text : {"\xd8\x9b", "\xef\xbb\xbc", "\xf3\xa0\x84\x80"}) EXPECT_EQ(Printable(text), text);
}

TEST(HasControlCharacters, InWhateverFormTheyCome) {
  for (const std::string& name :
       {std::string("a\nb"), std::string("\x1b[2J"), std::string("\x7f"), std::string("a\0b", 3),
        std::string("\xc2\x9b"
                    "2J"),
        std::string("\xc2\x80"), std::string("\xc2\x9f"),
        std::string("\x9b"
                    "2J"),
        std::string("\xe9\x80"), std::string("\t"), std::string("\xe2\x80\xa8"), std::string("\xe2\x80\xa9"),
        std::string("a\xe2\x80\xaa"),
        std::string("\xe2\x80\xae"
                    "gpj.exe"),
        std::string("\xe2\x81\xa6"), std::string("\xe2\x81\xa9")}) {
    EXPECT_TRUE(HasControlCharacters(name)) << Printable(name);
  }
  for (const std::string& name :
       {std::string("plain name"), std::string("\xc2\xa0"), std::string("\xc3\xa9"), std::string("\xe9"),
        std::string("\xf0\x9f\x9a\x8c"), std::string("\xd8\x9c"), std::string("\xe2\x80\x8b"),
        std::string("\xe2\x80\x8f"), std::string("\xe2\x81\xa5"), std::string("\xe2\x81\xaa"),
        std::string("\xef\xbb\xbf"), std::string("\xf3\xa0\x81\xbf"), std::string("\xe2\x80\xa7"),
        std::string("\xe2\x80\xaf"), std::string("~"), std::string(" "), std::string("\\")}) {
    EXPECT_FALSE(HasControlCharacters(name)) << Printable(name);
  }
}

}  // namespace
}  // namespace stagecoach::rpcrdma::file
