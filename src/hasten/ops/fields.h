// Operators that take the fields of one struct as their arguments.
//
//   struct Scaled {
//     Tensor x;
//     double factor;
//     HASTEN_FIELDS(x, factor)
//   };
//   Tensor scaled(Scaled call);
//   define<scaled>(m, "scaled");     // scaled(Tensor x, float factor) -> Tensor
//   implement<scaled>(m, "scaled");
//
// The list in the struct is the only one: torch's schema and the reading of the arguments follow from it, so no argument is
// read as another one or as another type. Python names them too (calls.py), and loading the library compares the names.
#pragma once

#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tensors.h"

namespace hasten {

// The arguments in their order. A field may be a struct with fields of its own, which are arguments then.
#define HASTEN_FIELDS(...)                                      \
  static constexpr std::string_view field_names = #__VA_ARGS__; \
  auto fields() { return std::tie(__VA_ARGS__); }
// Those of them that the operator writes to.
#define HASTEN_WRITTEN(...) static constexpr std::string_view written_names = #__VA_ARGS__;

template <class T>
concept HasFields = requires(T& t) { t.fields(); };

// A type in torch's schemas; `alias` marks what is written.
template <class T>
struct SchemaType;
template <> struct SchemaType<Tensor> { static std::string of(const std::string& alias) { return "Tensor" + alias; } };
template <> struct SchemaType<int64_t> { static std::string of(const std::string&) { return "int"; } };
template <> struct SchemaType<double> { static std::string of(const std::string&) { return "float"; } };
template <> struct SchemaType<bool> { static std::string of(const std::string&) { return "bool"; } };
template <class T> struct SchemaType<std::optional<T>> {
  static std::string of(const std::string& alias) { return SchemaType<T>::of(alias) + "?"; }
};
template <class T> struct SchemaType<std::vector<T>> {
  static std::string of(const std::string& alias) { return SchemaType<T>::of(alias) + "[]"; }
};

// Takes the first name from a list "a, b, c".
inline std::string_view next_name(std::string_view& names) {
  const size_t end = names.find(',');
  const std::string_view first = names.substr(0, end);
  names.remove_prefix(end == names.npos ? names.size() : end + 2);
  return first;
}

template <class Call>
bool is_written(std::string_view name) {
  if constexpr (requires { Call::written_names; })
    for (std::string_view names = Call::written_names; !names.empty();)
      if (next_name(names) == name) return true;
  return false;
}

// Appends "type name, " for each argument. aliases: how many were written so far.
template <class Call>
void describe(std::string& schema, char& aliases) {
  std::string_view names = Call::field_names;
  auto add = [&]<class Field>(std::type_identity<Field&>) {
    const std::string_view name = next_name(names);
    if constexpr (HasFields<Field>) return describe<Field>(schema, aliases);
    else {
      const bool written = is_written<Call>(name);
      const std::string alias = written ? std::string("(") + aliases++ + "!)" : "";
      schema.append(SchemaType<Field>::of(alias)).append(" ").append(name).append(", ");
    }
  };
  [&]<class... Fields>(std::type_identity<std::tuple<Fields...>>) {
    (add(std::type_identity<Fields>{}), ...);
  }(std::type_identity<decltype(std::declval<Call&>().fields())>{});
}

// Reads the fields from torch's stack, which gives each up once.
template <class Call>
void read(Call& call, StableIValue*& next) {
  auto one = [&]<class Field>(Field& field) {
    if constexpr (HasFields<Field>) read(field, next);
    else field = torch::stable::detail::to<Field>(*next++);
  };
  std::apply([&](auto&... fields) { (one(fields), ...); }, call.fields());
}

template <auto function>
struct Operator;
template <class Result, class Call, Result (*function)(Call)>
struct Operator<function> {
  static std::string schema(const char* name) {
    std::string text = std::string(name) + "(";
    char aliases = 'a';
    describe<Call>(text, aliases);
    text.erase(text.size() - 2);  // the last ", "
    return text + ") -> " + SchemaType<Result>::of("");
  }
  static void boxed(StableIValue* stack, uint64_t, uint64_t) {
    Call call;
    StableIValue* next = stack;
    read(call, next);
    stack[0] = torch::stable::detail::from(function(std::move(call)));
  }
};

template <auto function, class Library>
void define(Library& library, const char* name) {
  library.def(Operator<function>::schema(name).c_str());
}
template <auto function, class Library>
void implement(Library& library, const char* name) {
  library.impl(name, Operator<function>::boxed);
}

}  // namespace hasten
